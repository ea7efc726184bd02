"""Formatter of a plan's text, which checks that the result is equivalent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.formatting.unparse import format_plan
from legoai.dsl.frontend.parsing.parse import parse
from legoai.dsl.frontend.parsing.suppress import suppressions
from legoai.dsl.frontend.syntax import AnyStatement, Node, PlanFile, children, same


class FormattingError(Exception):
    """The formatter would have changed a plan's meaning: an internal error."""


@dataclass(frozen=True, slots=True)
class Formatted:
    """A plan's text in the canonical layout; None where it could not be read, for the reasons in ``diagnostics``."""

    text: str | None
    diagnostics: tuple[Diagnostic, ...]


def format_text(text: str, name: str) -> Formatted:
    """Format the text of the plan called ``name``.

    Raises:
        FormattingError: the result would not be equivalent to ``text``.
    """
    parsed = parse(text, name)
    if parsed.diagnostics:
        return Formatted(None, parsed.diagnostics)
    after = _laid_out(parsed.file)
    check_format(parsed.file, after)
    return Formatted(after, ())


def check_format(before: PlanFile, after: str) -> None:
    """Check that ``after`` is ``before`` formatted: same tree, no comment lost, same suppressions, stable.

    Raises:
        FormattingError: it is not.
    """
    parsed = parse(after, before.name)
    if parsed.diagnostics:
        found = parsed.diagnostics[0]
        raise FormattingError(f"the formatted plan cannot be read: {found.label.span}: {found.message}")
    if not same(before.statements, parsed.file.statements):
        raise FormattingError("the formatted plan says something else")
    if _comments(before) != _comments(parsed.file):
        raise FormattingError("formatting lost or moved a comment")
    if _covered(before) != _covered(parsed.file):
        raise FormattingError("formatting changed what a suppression comment covers")
    if _laid_out(parsed.file) != after:
        raise FormattingError("formatting the formatted plan changes it again")


def _laid_out(file: PlanFile) -> str:
    """The canonical layout, without the statements in which it would change what a suppression comment covers."""
    after = format_plan(file)
    before = _covered(file)
    owners = [owner for _, owner in _nodes(file)] if before else []
    as_written: set[int] = set()
    while before:
        parsed = parse(after, file.name)
        changed = {
            owners[node]
            for ours, theirs in zip(before, _covered(parsed.file), strict=False)
            for node, _ in ours ^ theirs
            if node < len(owners)
        } - as_written
        if parsed.diagnostics or not changed:
            break
        as_written |= changed
        after = format_plan(file, as_written)
    return after


def _covered(file: PlanFile) -> list[frozenset[tuple[int, int]]]:
    """The first and last lines (0 and 1) of nodes, by the node's number, that each suppression applies to."""
    found = list(suppressions(file))
    nodes = [node.span for node, _ in _nodes(file)] if found else []
    return [
        frozenset(
            (number, end)
            for number, span in enumerate(nodes)
            for end, line in enumerate((span.line, span.end_line))
            if line in item.lines
        )
        for item in found
    ]


def _nodes(file: PlanFile) -> Iterator[tuple[Node, int]]:
    """All nodes of a file and its comments, each with the offset of its innermost statement.

    The statement of a comment is the one that it stands in or behind.
    """
    statements: list[tuple[int, int, int]] = []

    def inside(node: Node, owner: int) -> Iterator[tuple[Node, int]]:
        if isinstance(node, AnyStatement):
            owner = node.span.start
            statements.append((node.span.line, node.span.end_line, owner))
        yield node, owner
        for child in children(node):
            yield from inside(child, owner)

    for statement in file.statements:
        yield from inside(statement, statement.span.start)
    for comment in file.comments:
        line = comment.span.line
        owners = [owner for first, last, owner in statements if first <= line <= last and owner < comment.span.start]
        yield comment, owners[-1] if owners else comment.span.start


def _comments(file: PlanFile) -> list[str]:
    return [comment.text.rstrip() for comment in file.comments]
