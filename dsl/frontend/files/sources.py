"""Lookup, reading and writing of the plans that a user names."""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from legoai.dsl.diagnostics.codes.files import CannotRead, TooLarge
from legoai.dsl.diagnostics.codes.syntax import NotText
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.diagnostics.suggestion import suggestion
from legoai.dsl.frontend.syntax import PlanFile
from legoai.dsl.frontend.text import Lines
from legoai.specs.files import MOST_TEXT, is_stream, read_file
from legoai.specs.record import Record
from legoai.specs.span import Span

STANDARD_INPUT: Final = "-"
_SHORT = re.compile(r"plan\.([A-Za-z_][A-Za-z0-9_]*)")
_ENCODING: Final = "utf-8-sig"
"""UTF-8; a byte-order mark before the text is not part of it."""
_MARK: Final = "\ufeff"
"""The byte-order mark."""


class Source(Record):
    """A plan's text; ``name`` is that of its file in diagnostics, ``path`` is None for standard input.

    ``mark`` is whether the file starts with a byte-order mark, which is not part of the text.
    """

    name: str
    text: str
    path: Path | None
    mark: bool = False

    @property
    def directory(self) -> Path:
        """Base of relative file names in the plan."""
        return (self.path or Path(self.name)).parent

    @property
    def rewritable(self) -> Path | None:
        """The file that a changed text replaces; None for standard input and other streams."""
        return None if self.path is None or is_stream(self.path) else self.path

    def content(self, text: str) -> str:
        """The content of the file with another text."""
        return f"{_MARK}{text}" if self.mark else text


class UnreadableError(Exception):
    """A plan cannot be read; a diagnostic gives the reason, and ``file`` the part that could be read."""

    def __init__(self, diagnostic: Diagnostic, file: PlanFile | None = None) -> None:
        super().__init__(diagnostic.message)
        self.diagnostic = diagnostic
        self.file = file


_SKIPPED: Final = frozenset({"node_modules", "site-packages", "__pypackages__", "__pycache__", "venv"})
"""Folders of other people's files. Hidden ones and virtual environments are left out too."""


class Excluded(Record):
    """Files and folders to leave out: patterns of a project, relative to the folder of its configuration.

    A pattern without a slash matches a file or folder at any depth, one with a slash a path from ``folder``; `*` and
    `?` match any characters.
    """

    patterns: tuple[str, ...] = ()
    folder: Path | None = None

    def __call__(self, path: str) -> bool:
        """Whether the file or folder at ``path`` is left out."""
        if not self.patterns:
            return False
        from fnmatch import fnmatchcase

        name = os.path.basename(path)  # noqa: PTH119 - a folder may contain a name that Path refuses
        place = os.path.relpath(path, self.folder).replace(os.sep, "/")
        return any(
            fnmatchcase(place, pattern.strip("/").removeprefix("./")) if "/" in pattern.rstrip("/") else
            fnmatchcase(name, pattern.rstrip("/"))
            for pattern in self.patterns
        )  # fmt: skip


def named(arguments: Sequence[str], excluded: Excluded | None = None) -> Iterator[str]:
    """Yield the arguments, with each directory replaced by the plans in it and below it, without ``excluded`` ones.

    Hidden folders, virtual environments and other people's packages are left out of directories, but not if they are
    named themselves. A directory without plans, or one that cannot be listed, stays, so that reading it reports the
    error. A plan that is named twice comes once.
    """
    seen: set[str] = set()
    for argument in arguments:
        is_directory = os.path.isdir(argument)  # noqa: PTH112 - false for an invalid file name, where Path raises
        inside = sorted(_plans_below(argument, excluded or Excluded())) if is_directory else []
        for name in inside or [argument]:
            if name not in seen:
                seen.add(name)
                yield name


def _plans_below(directory: str, excluded: Excluded) -> Iterator[str]:
    """The plans in a directory and below it, then the folders that cannot be listed."""
    unreadable: list[OSError] = []
    for folder, folders, files in os.walk(directory, onerror=unreadable.append):
        folders[:] = [name for name in folders if not is_skipped(folder, name) and not excluded(f"{folder}/{name}")]
        for name in files:
            path = f"{folder}/{name}"
            if name.endswith(".plan") and not excluded(path) and not _is_special(path):
                yield str(Path(folder, name))
    yield from (str(Path(error.filename)) for error in unreadable)


def _is_special(path: str) -> bool:
    """Whether there is something else than a file, such as a pipe, that reading could wait for."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)  # noqa: PTH116 - a folder may contain a name that Path refuses
    except OSError:
        return False  # reading it reports the error


def is_skipped(folder: str, name: str) -> bool:
    """Whether a folder is hidden, or contains other people's files."""
    if name.startswith(".") or name in _SKIPPED:
        return True
    marks = ("pyvenv.cfg", "conda-meta")
    return any(os.path.exists(f"{folder}/{name}/{mark}") for mark in marks)  # noqa: PTH110 - false if it may not look


def read_source(argument: str, standard_input: str | None = None) -> Source:
    """Read the plan that ``argument`` names: a path, ``plan.NAME``, or ``-``, which may be given a name.

    Raises:
        UnreadableError: there is no such file, or it is not text.
    """
    path = None if argument == STANDARD_INPUT else locate(argument)
    name = str(path) if path is not None else standard_input or "<stdin>"
    try:
        data = _read_standard_input() if path is None else _read_bytes(path)
    except (OSError, ValueError) as error:
        raise _cannot_read(name, error) from error
    return Source(name, decoded(data, name), path, data.startswith(_MARK.encode()))


def read_base(path: Path) -> str:
    """Read a base plan.

    Raises:
        OSError: it cannot be read, it is no regular file, or it is too large.
        ValueError: it is not UTF-8.
    """
    return read_file(path, MOST_TEXT).decode(_ENCODING)


def locate(argument: str) -> Path:
    """Return the file of a path or ``plan.NAME``.

    Raises:
        UnreadableError: there is no plan of that name.
    """
    short = _SHORT.fullmatch(argument)
    if short is None or Path(argument).exists():
        return Path(argument)
    name = f"{short[1]}.plan"
    for path in (Path(name), Path("plans", name)):
        if path.is_file():
            return path
    known = [path.stem for folder in (Path(), Path("plans")) for path in folder.glob("*.plan")]
    raise UnreadableError(
        CannotRead.at(
            _nowhere(argument),
            f"there is no plan `{short[1]}`",
            help=[*suggestion(short[1], known), f"looked for `{name}` and `plans/{name}`"],
        )
    )


def _read_standard_input() -> bytes:
    if sys.stdin is None:  # a process that was started without one
        raise OSError(errno.EBADF, "it is closed")
    return sys.stdin.buffer.read(MOST_TEXT + 1)


def _read_bytes(path: Path) -> bytes:
    """Return at most one byte more than a plan may have: the user may name a device, or a pipe to wait for."""
    with path.open("rb") as stream:
        return stream.read(MOST_TEXT + 1)


def _cannot_read(name: str, error: OSError | ValueError) -> UnreadableError:
    if isinstance(error, IsADirectoryError):
        inside = (path for path in _plans_below(name, Excluded()) if not os.path.isdir(path))  # noqa: PTH112
        return UnreadableError(
            CannotRead.at(
                _nowhere(name), f"`{name}` is a directory",
                help=["name one of its plans" if any(inside) else "there is no plan in it"],
            )
        )  # fmt: skip
    reason = (error.strerror or "it cannot be opened") if isinstance(error, OSError) else "this is no file name"
    help = []
    if isinstance(error, FileNotFoundError) and os.path.islink(name):  # noqa: PTH114 - a name Path may refuse
        reason = f"it is a link to `{os.readlink(name)}`, which does not exist"  # noqa: PTH115
    elif isinstance(error, FileNotFoundError):
        folder, word = os.path.split(name)
        try:
            known = [entry.name for entry in Path(folder).iterdir() if entry.suffix == ".plan"]
        except OSError:
            known = []
        help = [line.replace("`", f"`{folder}/", 1) if folder else line for line in suggestion(word, known)]
    return UnreadableError(
        CannotRead.at(_nowhere(name), f"`{name}` cannot be read: {reason[:1].lower()}{reason[1:]}", help=help)
    )


def decoded(data: bytes, name: str) -> str:
    """The text of a plan's bytes.

    Raises:
        UnreadableError: they are too many, or no UTF-8.
    """
    if len(data) > MOST_TEXT:
        raise UnreadableError(
            TooLarge.at(_nowhere(name), f"`{name}` has more than 4 MiB", help=["a plan has some hundred lines"])
        )
    try:
        text = data.decode(_ENCODING)
    except UnicodeDecodeError as error:
        data = error.object  # from which the error counts: without a mark
        before = len(data[: error.start].decode("utf-8", "replace"))
        shown = data.decode("utf-8", "replace")
        raise _not_text(shown, name, before, f"the byte 0x{data[error.start]:02x} is not UTF-8") from error
    if "\0" in text:
        raise _not_text(text, name, text.index("\0"), "a NUL character")
    return text


def _not_text(text: str, name: str, offset: int, found: str) -> UnreadableError:
    span = Lines(text, name).span(offset, offset + 1)
    diagnostic = NotText.at(
        span,
        f"`{name}` is not plain UTF-8 text",
        label=found,
        help=["save the file as UTF-8"],
    )
    return UnreadableError(diagnostic, PlanFile(name, text, (), ()))


def _nowhere(name: str) -> Span:
    """The span of a file that cannot be looked into."""
    return Span(name, 0, 0, 1, 1, 1, 1)
