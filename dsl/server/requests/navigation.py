"""Definitions and uses of names: `let` names, axes of the mesh, variants, and files that a plan names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from lsprotocol import types

from legoai.dsl.frontend.files.project import MOST_FOLDERS, TooManyFoldersError
from legoai.dsl.frontend.parsing.parse import parse
from legoai.dsl.frontend.syntax import (
    AnyStatement,
    Let,
    Name,
    Node,
    PathText,
    PlanFile,
    Require,
    Statement,
    String,
    Unset,
    Variant,
    children,
)
from legoai.dsl.frontend.values.ranges import ends_of, part_of
from legoai.dsl.frontend.values.reserved import reserved_names
from legoai.dsl.server.documents import Checked, Checking, uri_of
from legoai.dsl.server.requests.relatives import relatives
from legoai.specs.directives.mesh import AXES
from legoai.specs.models.manifests.cache import find_module_file
from legoai.specs.record import Record, replace
from legoai.specs.span import Span


class Use(Record):
    """An occurrence of a name; ``defines`` for its definition."""

    sort: Literal["let", "axis", "variant"]
    name: str
    span: Span
    defines: bool


def uses(file: PlanFile, names: set[str]) -> Iterator[Use]:
    """Yield every name in a file that the plan defines; ``names`` are those of `let` in all its files."""
    for statement in file.statements:
        yield from _uses(statement, names)


def _uses(node: Node, names: set[str]) -> Iterator[Use]:
    if isinstance(node, Let):
        yield Use("let", node.name.text, node.name.span, True)
        yield from _uses(node.value, names)
    elif isinstance(node, Variant):
        yield Use("variant", node.name.text, node.name.span, True)
        for inner in node.statements:
            yield from _uses(inner, names)
    elif isinstance(node, Unset):
        yield from _unset(node)
    elif isinstance(node, Require):
        yield from _uses(node.bound, names)
    elif isinstance(node, Statement):
        yield from _statement(node, names)
    elif isinstance(node, Name):
        if node.text in names:
            yield Use("let", node.text, node.span, False)
    elif isinstance(node, PathText):
        yield from _in_path(node, names)
    else:
        for child in children(node):
            # The name of an argument or a call is the language's own.
            if child is not getattr(node, "name", None):
                yield from _uses(child, names)


def _in_path(path: PathText, names: set[str]) -> Iterator[Use]:
    """The uses in the ends of ranges: `layers.{0..n - 1}`."""
    for offset, end in ends_of(path):
        for use in _uses(end, names):
            yield replace(use, span=part_of(path.span, offset + use.span.start, use.span.end - use.span.start))


def _statement(node: Statement, names: set[str]) -> Iterator[Use]:
    for axis in node.axes:
        yield Use("axis", axis.text, axis.span, False)
    if node.keyword.text == "mesh" and node.options is not None:
        for item in node.options.items:
            if item.name is not None and item.name.text in AXES:
                yield Use("axis", item.name.text, item.name.span, True)
    for part in (node.subject, node.options, node.block):
        if part is not None:
            yield from _uses(part, names)


def _unset(node: Unset) -> Iterator[Use]:
    sort = node.what.text
    if node.name is not None and sort in ("let", "variant"):
        yield Use("let" if sort == "let" else "variant", node.name.text, node.name.span, False)
    for axis in node.axes:
        yield Use("axis", axis.text, axis.span, False)


def use_at(checked: Checked, offset: int) -> Use | None:
    """The name at a character of the document."""
    file, names = checked.document.file, _let_names(checked)
    return next((use for use in uses(file, names) if use.span.start <= offset <= use.span.end), None)


def _let_names(checked: Checked) -> set[str]:
    return {item.name.text for item in _statements(checked) if isinstance(item, Let)}


def _statements(checked: Checked) -> Iterator[AnyStatement]:
    """The statements of all files, and those in variants."""
    for file in (checked.document.file, *checked.files.values()):
        yield from _with_variants(file)


def _with_variants(file: PlanFile) -> Iterator[AnyStatement]:
    for item in file.statements:
        yield item
        if isinstance(item, Variant):
            yield from item.statements


def definition(checked: Checked, offset: int) -> list[types.Location]:
    """Return the definition of the name at a character, or the file that it names."""
    use = use_at(checked, offset)
    if use is not None:
        return [item for item, defines in _like(checked, use) if defines]
    file = _file_at(checked, offset)
    return (
        [] if file is None else [types.Location(uri_of(file), types.Range(types.Position(0, 0), types.Position(0, 0)))]
    )


def references(checked: Checked, offset: int, *, definitions: bool) -> list[types.Location]:
    """Every use of the name at a character, in the document and the plans that it extends."""
    use = use_at(checked, offset)
    return [] if use is None else [item for item, defines in _like(checked, use) if definitions or not defines]


def renamed(
    checked: Checked, offset: int, name: str, checking: Checking, folders: Iterable[Path]
) -> types.WorkspaceEdit:
    """Return the edit that renames a `let` or a variant, in the document and in all plans that share it by `extends`.

    Raises:
        CannotRenameError: there is no such name here, the new one is not allowed, or plans that share it are not found.
    """
    use = renameable(checked, offset)
    if use is None:
        raise CannotRenameError("only names of `let` and of variants are the plan's own")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or (use.sort == "let" and name in reserved_names()):
        raise CannotRenameError(f"`{name}` is a name of the language, or no name")

    def places(file: PlanFile) -> list[Span]:
        return [item.span for item in uses(file, {use.name}) if (item.sort, item.name) == (use.sort, use.name)]

    try:
        files = relatives(checked, checking, folders, lambda file: bool(places(file)))
    except TooManyFoldersError:
        raise CannotRenameError(
            f"the workspace has more than {MOST_FOLDERS} folders, so plans that share the name are not found: "
            "open the folder of the plans"
        ) from None
    document = checked.document
    for path, file in files.items():
        whose = "the plan" if file.name in checked.files else f"`{os.path.relpath(path, document.directory)}`"
        if (unread := _unread(file, use.name)) is not None:
            raise CannotRenameError(
                f"{whose} has a syntax error in the statement of line {unread.line}, which has `{use.name}` too"
            )
        if _defines(file, use.sort, name):
            what = f"a `let` of the name `{name}`" if use.sort == "let" else f"a variant of the name `{name}`"
            raise CannotRenameError(f"{whose} has {what}")
    changes: dict[str, list[types.TextEdit]] = {}
    for path, file in files.items():
        positions = document.positions_of(file)
        edits = [types.TextEdit(positions.of(span), name) for span in places(file)]
        if edits:
            changes[document.uri if file.name == document.name else uri_of(path)] = edits
    return types.WorkspaceEdit(changes)


def _defines(file: PlanFile, sort: str, name: str) -> bool:
    """Whether a file, or a variant in it, defines a name."""
    kind = Let if sort == "let" else Variant
    return any(isinstance(item, kind) and item.name.text == name for item in _with_variants(file))


def _unread(file: PlanFile, name: str) -> Span | None:
    """The first statement with a syntax error that has a name, whose uses in it are not known."""
    if name not in file.text:
        return None
    word = re.compile(rf"\b{name}\b")
    damaged = parse(file.text, file.name).damaged
    return next((span for span in damaged if word.search(file.text, span.start, span.end)), None)


def renameable(checked: Checked, offset: int) -> Use | None:
    """The name at a character, where a person chose it."""
    use = use_at(checked, offset)
    return use if use is not None and use.sort != "axis" else None


class CannotRenameError(Exception):
    """A name is not allowed; the message gives the reason."""


def _like(checked: Checked, use: Use) -> Iterator[tuple[types.Location, bool]]:
    """The uses of the same name, and whether each defines it; those of the document first."""
    document = checked.document
    own, names = document.file, _let_names(checked)
    for file in (own, *(file for name, file in checked.files.items() if name != own.name)):
        positions = document.positions_of(file)
        uri = document.uri if file.name == own.name else uri_of(Path(file.name))
        for other in uses(file, names):
            if (other.sort, other.name) == (use.sort, use.name):
                yield types.Location(uri, positions.of(other.span)), other.defines


def _file_at(checked: Checked, offset: int) -> Path | None:
    """The file that the string at a character names: a base plan, an order file, a profile, or a factory's module."""
    document = checked.document
    found = next(
        (node for node in _strings(document.file) if node.span.start <= offset <= node.span.end and node.text), None
    )
    if found is None or "\0" in found.text:
        return None
    path = document.directory / found.text
    if path.is_file():
        return path
    module, colon, _ = found.text.partition(":")
    if colon and all(part.isidentifier() for part in module.split(".")):
        return find_module_file(module, [str(document.directory)])
    return None


def _strings(file: PlanFile) -> Iterator[String]:
    def visit(node: Node) -> Iterator[String]:
        if isinstance(node, String):
            yield node
        for child in children(node):
            yield from visit(child)

    for statement in file.statements:
        yield from visit(statement)
