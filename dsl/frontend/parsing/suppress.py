"""`# legoai: ignore[CODE]`: diagnostics that a person has looked at and accepts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.frontend.syntax import (
    Argument,
    Comment,
    Let,
    Node,
    PlanFile,
    Require,
    RuleLine,
    SolvedLine,
    Statement,
    Variant,
    children,
)
from legoai.dsl.frontend.text import Lines
from legoai.specs.record import Record
from legoai.specs.span import Span

SUPPRESSION: Final = re.compile(r"#\s*legoai:\s*ignore\[([^\]]*)\]")
"""A comment that suppresses, with the codes that it names."""
_VERBS: Final = r"(?:ignore|ignored(?=\s*[\[(:])|noqa|nolint|disable|suppress|allow|accept|skip|off)"
_CODES: Final = r"LP\s*-?\d+"
_ALMOST = re.compile(
    rf"#+\s*(?:"
    rf"(?:(?:legoai|lego-ai|lego_ai)\s*[:=,.\-]?|lego\s*:)\s*{_VERBS}(?![a-z])"  # our name, and a word for suppressing
    rf"|(?:[a-z]+\s*:\s*)?{_VERBS}(?:-next-line|-line|-file)?\s*[:=(\[]?\s*{_CODES}"  # another tool's form, our code
    rf"|legoai\s*:\s*{_CODES}"
    rf")",
    re.IGNORECASE,
)
"""Text that looks like an intended suppression; unless it matches :data:`SUPPRESSION`, it suppresses nothing."""
_FURTHER: Final = re.compile(r"[ \t](?=#[^\d])")
"""What is before a further part of a comment, which a number of an issue is not."""

NEVER_ACCEPTED: Final = (
    *("LP0", "LP1", "LP2", "LP309", "LP315", "LP406", "LP408", "LP410"),
    *("LP501", "LP505", "LP506", "LP507", "LP508", "LP509", "LP510", "LP511", "LP512", "LP513", "LP514", "LP515"),
    *("LP518", "LP520", "LP601", "LP604", "LP624", "LP657", "LP718"),
)
"""Codes, or prefixes, of diagnostics after which there is no plan to accept, or no figure to check: unreadable text,
unknown names, groups of ranks that a mesh cannot form, placements and layouts that no tensor has, impossible stages and
micro batches, sequences without a length, options that a traced step has no place for, devices that were not measured,
models that are not simulated. All other errors leave a program: lowering relies on these not being there."""


class Suppression(Record):
    """One rule in a suppression comment, by code or name: the lines that it applies to, and its span.

    ``whole`` is the span to delete where it is not wanted: one comma with it, or the suppression of which it is all.
    """

    code: str
    lines: range
    span: Span
    whole: Span


def suppressions(file: PlanFile) -> Iterator[Suppression]:
    """Yield every suppression of a file.

    A comment after code applies to that line, one on its own line to the next with code. Where a statement, a rule or
    an option ends on the one or begins on the other, it applies to all its lines: the formatter breaks lines, and
    leaves the comment at the end of its item.
    """
    lines = file.text.split("\n")
    at = Lines(file.text, file.name)
    begins: dict[int, list[Span]] | None = None
    ends: dict[int, list[Span]] = {}
    for comment in file.comments:
        match = SUPPRESSION.search(comment.text)
        if match is None:
            continue
        line = comment.span.line
        if comment.alone:
            line += 1
            while line <= len(lines) and (not lines[line - 1].strip() or lines[line - 1].lstrip().startswith("#")):
                line += 1
        if begins is None:
            begins = {}
            for item in (item for statement in file.statements for item in _items(statement)):
                begins.setdefault(item.span.line, []).append(item.span)
                ends.setdefault(item.span.end_line, []).append(item.span)
        meant = (begins if comment.alone else ends).get(line, [])
        first, last = min([line, *(span.line for span in meant)]), max([line, *(span.end_line for span in meant)])
        codes = list(re.finditer(r"[^,\s]+", match[1]))
        inside = comment.span.start + match.start(1)
        for index, code in enumerate(codes):
            if len(codes) == 1:
                whole = _whole(file.text, comment.span.start + match.start(), comment.span.start + match.end())
            elif index + 1 < len(codes):
                whole = code.start() + inside, codes[index + 1].start() + inside
            else:
                whole = codes[index - 1].end() + inside, comment.span.start + match.end(1)
            span = at.span(code.start() + inside, code.end() + inside)
            yield Suppression(code[0].upper(), range(first, last + 1), span, at.span(*whole))


def _whole(text: str, start: int, end: int) -> tuple[int, int]:
    """The bounds of a suppression with its reason and the blanks before it; of its line, where that has nothing else.

    The comment may have other parts before it, and behind a further `#`.
    """
    line_end = end + len(text[end:].partition("\n")[0])
    more = _FURTHER.search(text, end, line_end)
    if more is not None:
        return start, more.end()
    start = len(text[:start].rstrip(" \t"))
    if start == 0 or text[start - 1] == "\n":
        return start, min(line_end + 1, len(text))
    return start, len(text[:line_end].rstrip("\r"))


class Malformed(Record):
    """Yield comments that look like suppressions and are not: their spans, and the codes that they name."""

    span: Span
    codes: tuple[str, ...]


def malformed(file: PlanFile) -> Iterator[Malformed]:
    """The comments of a file that suppress nothing because of how they are written."""
    for comment in file.comments:
        written = SUPPRESSION.search(comment.text)
        if written is not None and written[1].strip(" ,\t"):
            continue
        almost = _ALMOST.search(comment.text) if written is None else written
        if almost is not None:
            rest = comment.text[almost.start() :]
            codes = re.findall(r"\bLP[\s-]*(\d{3})\b", rest, re.IGNORECASE)
            yield Malformed(_inside(comment, almost.start()), tuple(f"LP{code}" for code in dict.fromkeys(codes)))


def _inside(comment: Comment, offset: int) -> Span:
    """The span of a comment's text from ``offset`` on, without the blanks at its end."""
    span = comment.span
    end = len(comment.text.rstrip())
    return span._replace(
        start=span.start + offset, column=span.column + offset, end=span.start + end, end_column=span.column + end
    )


def _items(node: Node) -> Iterator[Node]:
    """The parts of a file that a comment may speak of as a whole."""
    if isinstance(node, RuleLine | Argument | Statement | Let | Require | SolvedLine | Variant):
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
    at: dict[tuple[str, str, int], list[Suppression]] = {}
    for item in wanted:
        for line in item.lines:
            at.setdefault((item.span.file, item.code, line), []).append(item)
    used = set()
    kept = []
    for diagnostic in diagnostics:
        place = diagnostic.label.span
        names = (diagnostic.code, diagnostic.slug.upper()) if at else ()
        meant = [item for name in names for item in at.get((place.file, name, place.line), ())]
        if meant and suppressible(diagnostic):
            used.update(meant)
        else:
            kept.append(diagnostic)
    return kept, [item for item in wanted if item in used], [item for item in wanted if item not in used]
