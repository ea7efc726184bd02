"""Documents that are open in an editor: their texts, their files, and the results of linting."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from legoai.dsl.config import Configuration, ConfigurationError, find_configuration, reported
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.frontend.files.sources import UnreadableError, decoded, read_base
from legoai.dsl.frontend.parsing.parse import Parsed, parse
from legoai.dsl.frontend.syntax import PlanFile, Statement, String
from legoai.dsl.lint import Announce, Factories, Linted, lint
from legoai.dsl.server.positions import Positions
from legoai.specs.directives.model import Model
from legoai.specs.models.manifests.cache import is_cached
from legoai.specs.models.manifests.manifest import ManifestError
from legoai.specs.record import Record

_MARK: Final = "\ufeff"

Approved = Collection[tuple[Path, str | None]]
"""Model factories that the user has allowed to run: the plan's folder, and the factory as the plan names it."""


class Document:
    """One version of a document's text.

    Args:
        uri: the client's name of it.
        version: the client's number of this version.
        text: as the client sent it.
        encoding: of the client's character offsets.
        folder: assumed folder of a document without a file.
    """

    def __init__(self, uri: str, version: int | None, text: str, encoding: str, folder: Path) -> None:
        self.uri = uri
        self.version = version
        self.text = text.removeprefix(_MARK)
        self._marked = text.startswith(_MARK)
        self._encoding = encoding
        self.path = path_of(uri)
        """The file; None for a document that has none yet."""
        self.directory = folder if self.path is None else self.path.parent
        """Base of relative file names in the plan."""
        self.name = unquote(urlsplit(uri).path) or "untitled" if self.path is None else str(self.path)
        """Its name in diagnostics: the whole path, since a server may outlive its working folder."""

    @cached_property
    def positions(self) -> Positions:
        """The positions of the text."""
        return Positions(self.text, self._encoding, mark=self._marked)

    @property
    def parsed(self) -> Parsed:
        """The text as it is read."""
        return parse(self.text, self.name)

    @property
    def file(self) -> PlanFile:
        """The syntax tree, without the statements that cannot be read."""
        return self.parsed.file

    def extended(self) -> Iterator[tuple[String, Path]]:
        """The file names of the plans that this one extends, and the files."""
        return extended(self.file, self.directory)

    def positions_of(self, file: PlanFile) -> Positions:
        """The positions of this document, or of a file that its plan extends."""
        return self.positions if file.name == self.name else Positions(file.text, self._encoding)


def extended(file: PlanFile, directory: Path) -> Iterator[tuple[String, Path]]:
    """The file names of the plans that a plan extends, and the files; ``directory`` is its own."""
    for statement in file.statements:
        if isinstance(statement, Statement) and statement.keyword.text == "extends":
            name = statement.subject
            if isinstance(name, String) and "\0" not in name.text:
                yield name, Path(os.path.normpath(directory / name.text))


class Checked(Record):
    """Result of linting a document; ``linted`` is None where the text cannot be that of a plan."""

    document: Document
    linted: Linted | None
    diagnostics: tuple[Diagnostic, ...]
    """Those that the project's configuration reports."""
    files: Mapping[str, PlanFile]
    configuration: Configuration
    problem: str | None
    """Error of the configuration."""


class Checking(Record):
    """Return a key of everything besides the document itself that linting depends on."""

    texts: Mapping[Path, str]
    """The texts of files that are open, which count instead of those on disk."""
    approved: Approved
    announce: Announce

    def read(self, path: Path) -> str:
        """Read a base plan.

        Raises:
            OSError: it cannot be read, or it is too large.
            ValueError: it is not UTF-8.
        """
        held = self.texts.get(place_of(path))
        return read_base(path) if held is None else held


def check(document: Document, checking: Checking) -> Checked:
    """Lint a document as `legoai lint` lints a file with its text, by the configuration nearest to it."""
    configuration, problem = _configuration(document.directory)
    try:
        decoded(document.text.encode("utf-8", "surrogatepass"), document.name)
    except UnreadableError as error:
        files = {} if error.file is None else {document.name: error.file}
        return Checked(document, None, (error.diagnostic,), files, configuration, problem)
    linted = linted_as(document, document.text, checking)
    found = tuple(item for item in dict.fromkeys(linted.diagnostics) if reported(item, configuration))
    return Checked(document, linted, found, linted.files, configuration, problem)


def linted_as(document: Document, text: str, checking: Checking) -> Linted:
    """Lint the text of a document. No factory runs without approval."""

    def run(factories: Factories, announce: Announce) -> Linted:
        return lint(
            text,
            document.name,
            directory=document.directory,
            announce=announce,
            read=checking.read,
            factories=factories,
        )

    gate = _Gate(document.directory, checking)
    try:
        return run(gate.allows, gate.announce)
    except _RefusedError:
        return run(gate.is_approved, checking.announce)


class _RefusedError(Exception):
    """A factory without approval was about to run."""


class _Gate:
    """Decides whether to inspect a factory: with the user's approval, or where its manifest is cached."""

    def __init__(self, directory: Path, checking: Checking) -> None:
        self.directory = directory
        self.checking = checking
        self._known_only = False
        """Whether the model that linting looks at may be looked up alone."""

    def is_approved(self, model: Model) -> bool:
        """Whether a model needs no factory, or the user has approved it."""
        return model.family != "python" or (self.directory, model.target) in self.checking.approved

    def allows(self, model: Model) -> bool:
        """Whether linting may look at the model. It does so right after this."""
        self._known_only = not self.is_approved(model)
        if not self._known_only or model.target is None:
            return True
        try:
            return is_cached(model.source(), base_directory=self.directory)
        except ManifestError:
            return True  # the inspection finds it again without running anything, and reports it

    def announce(self, message: str) -> None:
        """Called right before a factory runs: a cache entry may have become stale since it was looked up."""
        if self._known_only:
            raise _RefusedError
        self.checking.announce(message)


def factory_of(linted: Linted) -> str | None:
    """The Python factory that a plan names as its model, if it does."""
    plan = linted.plan
    return None if plan is None or plan.model.family != "python" else plan.model.target


def path_of(uri: str) -> Path | None:
    """The file that a URI names, without links followed; None where it names none."""
    parts = urlsplit(uri)
    if parts.scheme != "file" or not parts.path:
        return None
    path = unquote(parts.path, errors="surrogateescape")
    return None if "\0" in path else Path(os.path.normpath(path))


def uri_of(path: Path) -> str:
    """The URI of a file."""
    return "file://" + quote(str(place_of(path)), errors="surrogateescape")


def place_of(path: str | Path) -> Path:
    """Return the one path of a file, as :func:`path_of` does, for any of its names in the server."""
    return Path(os.path.normpath(path))


def _configuration(directory: Path) -> tuple[Configuration, str | None]:
    try:
        return find_configuration(directory), None
    except ConfigurationError as error:
        return Configuration(), str(error)
