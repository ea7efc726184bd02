"""Edits that write the solver's answers and its line into a plan's text, and preserve every other character."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from legoai.dsl.diagnostics.diagnostic import Edit, Fix, apply_fixes, with_line_ends_of
from legoai.dsl.frontend import solved
from legoai.dsl.frontend.parsing.parse import parse
from legoai.dsl.frontend.syntax import Auto, Let, PlanFile, Require, SolvedLine, Statement, holes_in
from legoai.specs.plan import Solved
from legoai.specs.span import Span


class EditError(ValueError):
    """An edit has no valid position in the plan."""


def holes(file: PlanFile) -> Iterator[Auto]:
    """Yield every `auto` of the file, with an answer or without, in the order of the text."""
    for statement in file.statements:
        yield from holes_in(statement)


def write_answers(file: PlanFile, answers: Mapping[Span, str]) -> str:
    """Return the text with an answer after each hole: `auto -> 8`. The domain is kept, an old answer replaced.

    Args:
        file: the plan.
        answers: the answer's text by the span of the hole, as :func:`holes` gives it.

    Raises:
        EditError: a span is not that of a hole, or an answer is not a value.
    """
    edits = []
    for hole in _chosen(file, answers):
        answer = answers[hole.span]
        _check_value(answer)
        head = file.text[hole.span.start : hole.domain.span.end if hole.domain else hole.span.start + len("auto")]
        edits.append(Edit(hole.span, f"{head} -> {answer}"))
    return _apply(file.text, edits)


def pin(file: PlanFile, spans: Collection[Span] | None = None) -> str:
    """Return the text with each solved hole replaced by its answer: `auto -> 8` becomes `8`.

    Args:
        file: the plan.
        spans: the holes to pin, as :func:`holes` gives their spans; all that have answers by default.

    Raises:
        EditError: a span is not that of a hole with an answer, or an answer cannot replace its hole.
    """
    chosen = list(holes(file)) if spans is None else _chosen(file, spans)
    edits = []
    for hole in chosen:
        if hole.answer is not None:
            edits.append(Edit(hole.span, file.text[hole.answer.span.start : hole.answer.span.end]))
        elif spans is not None:
            raise EditError(f"{hole.span}: the hole has no answer to pin")
    text = _apply(file.text, edits)
    mistakes = parse(text, file.name).diagnostics
    if mistakes:
        # A sum is allowed after an arrow, but not alone after a keyword.
        raise EditError(f"{mistakes[0].label.span}: an answer cannot stand here by itself: {mistakes[0].message}")
    return text


def write_solved(file: PlanFile, record: Solved) -> str:
    """Return the text with the solver's line: replacing an old one, else below budgets and objective, else last."""
    line = solved.write(record)
    old = [item for item in file.statements if isinstance(item, SolvedLine)]
    if old:
        return _apply(file.text, [Edit(old[0].span, line)])
    goals = [item for item in file.statements if _is_goal(item)]
    if goals:
        end = file.text.find("\n", goals[-1].span.end)
        if end >= 0:
            return file.text[: end + 1] + with_line_ends_of(file.text, f"{line}\n") + file.text[end + 1 :]
    gap = "" if not file.text or file.text.endswith("\n") else "\n"
    blank = "" if goals or not file.statements else "\n"
    return file.text + with_line_ends_of(file.text, f"{gap}{blank}{line}\n")


def without_solved(file: PlanFile) -> str:
    """The text without the solver's line."""
    old = [item.span for item in file.statements if isinstance(item, SolvedLine)]
    edits = []
    for span in old:
        end = file.text.find("\n", span.end)
        alone = not file.text[span.end : end if end >= 0 else None].strip()
        edits.append(Edit(span._replace(end=end + 1) if alone and end >= 0 else span, ""))
    return _apply(file.text, edits)


def _chosen(file: PlanFile, spans: Collection[Span]) -> list[Auto]:
    """The holes with these spans."""
    by_span = {hole.span: hole for hole in holes(file)}
    for span in spans:
        if span not in by_span:
            raise EditError(f"{span}: there is no hole here")
    return [hole for span, hole in by_span.items() if span in spans]


def _check_value(text: str) -> None:
    parsed = parse(f"let answer = auto -> {text}", "answer")
    statements = parsed.file.statements
    whole = len(statements) == 1 and isinstance(statements[0], Let) and not parsed.file.comments
    if parsed.diagnostics or not whole or "\n" in text:
        raise EditError(f"`{text}` is not a value")


def _is_goal(item: object) -> bool:
    return isinstance(item, Require) or (isinstance(item, Statement) and item.keyword.text in ("minimize", "maximize"))


def _apply(text: str, edits: list[Edit]) -> str:
    return apply_fixes(text, [Fix("", (edit,), safe=True) for edit in edits])
