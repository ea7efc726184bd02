"""`# legoai: ignore[CODE]`: diagnostics that a person has looked at and accepts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.frontend.syntax import Argument, Node, PlanFile, RuleLine, Statement, children
from legoai.specs.record import Record
from legoai.specs.span import Span

_COMMENT = re.compile(r"#\s*legoai:\s*ignore\[([^\]]*)\]")

NEVER_ACCEPTED: Final = (
    *("LP0", "LP1", "LP2"),
    *("LP501", "LP505", "LP506", "LP507", "LP508", "LP509", "LP510", "LP511", "LP512", "LP513", "LP514", "LP515"),
    *("LP518", "LP601", "LP657"),
)
"""Codes, or how they begin, of diagnostics after which there is no plan to accept: text that cannot be read, names that
mean nothing, stages and micro batches that cannot be made."""


class Suppression(Record):
    """One code in a suppression comment: the lines that it speaks of, and where it stands."""

    code: str
    lines: range
    span: Span


def suppressions(file: PlanFile) -> Iterator[Suppression]:
    """Every suppression of a file.

    A comment behind a line speaks of that line, one alone of the next with code. Where a statement without rules, a
    rule or an option ends on the one or begins on the other, it speaks of all its lines: the formatter may have broken
    them.
    """
    lines = file.text.split("\n")
    items = None
    for comment in file.comments:
        match = _COMMENT.match(comment.text)
        if match is None:
            continue
        line = comment.span.line
        if comment.alone:
            line += 1
            while line <= len(lines) and (not lines[line - 1].strip() or lines[line - 1].lstrip().startswith("#")):
                line += 1
        if items is None:
            items = [item.span for statement in file.statements for item in _items(statement)]
        ends = [span for span in items if line == (span.line if comment.alone else span.end_line)]
        first, last = min([line, *(span.line for span in ends)]), max([line, *(span.end_line for span in ends)])
        for code in re.finditer(r"[^,\s]+", match[1]):
            start = comment.span.start + match.start(1) + code.start()
            column = comment.span.column + match.start(1) + code.start()
            length = len(code[0])
            where = comment.span
            span = Span(where.file, start, start + length, where.line, column, where.line, column + length)
            yield Suppression(code[0].upper(), range(first, last + 1), span)


def _items(node: Node) -> Iterator[Node]:
    """The parts of a statement that a comment may speak of as a whole."""
    if isinstance(node, RuleLine | Argument) or (isinstance(node, Statement) and node.block is None):
        yield node
    for child in children(node):
        yield from _items(child)


def suppressible(diagnostic: Diagnostic) -> bool:
    """Whether a diagnostic may be accepted."""
    return not diagnostic.code.startswith(NEVER_ACCEPTED)


def split(
    diagnostics: Iterable[Diagnostic], files: Iterable[PlanFile]
) -> tuple[list[Diagnostic], list[Suppression], list[Suppression]]:
    """The diagnostics that remain, the suppressions that took one away, and those that took none away."""
    wanted = [item for file in files for item in suppressions(file)]
    used = set()
    kept = []
    for diagnostic in diagnostics:
        place = diagnostic.label.span
        meant = [
            item
            for item in wanted
            if item.code == diagnostic.code and item.span.file == place.file and place.line in item.lines
        ]
        if meant and suppressible(diagnostic):
            used.update(meant)
        else:
            kept.append(diagnostic)
    return kept, [item for item in wanted if item in used], [item for item in wanted if item not in used]
