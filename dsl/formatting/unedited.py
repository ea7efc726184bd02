"""Spans of a text as a person wrote it, for those of the text after edits that a tool made in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from legoai.dsl.diagnostics.diagnostic import Diagnostic, Edit, Label, with_line_ends_of, with_spans
from legoai.dsl.frontend.syntax import PlanFile
from legoai.dsl.frontend.text import Lines
from legoai.specs.record import Record, replace
from legoai.specs.span import Span


class Unedited(Record):
    """A plan's file before edits, each of which belongs to a statement of it.

    What an edit inserted has the span of its statement, since no one wrote it.
    """

    file: PlanFile
    edits: tuple[tuple[Edit, Span], ...]
    """Each with the span of its statement, both in the text before."""

    def span(self, edited: Span) -> Span:
        """The span in the text before the edits; spans in other files are theirs already."""
        if edited.file != self.file.name:
            return edited
        start, last = self._offset(edited.start), self._offset(max(edited.start, edited.end - 1))
        found = [place for place in (start, last) if isinstance(place, Span)]
        if found:
            return found[0]
        assert isinstance(start, int) and isinstance(last, int)
        return Lines(self.file.text, self.file.name).span(start, last + (edited.end > edited.start))

    def diagnostics(self, found: Iterable[Diagnostic]) -> Iterator[Diagnostic]:
        """Yield diagnostics of the edited text with spans of the text before; several of one statement are one."""
        for item in found:
            fix = item.fix
            if fix is not None and any(self._is_inserted(edit.span) for edit in fix.edits):
                fix = None  # nothing can be replaced that was not written
            moved = with_spans(replace(item, fix=fix), self.span)
            yield replace(moved, others=tuple(_distinct(moved.others, moved.label)))

    def files(self, files: Mapping[str, PlanFile]) -> dict[str, PlanFile]:
        """The files of the edited plan, with the text before the edits."""
        return {**files, self.file.name: self.file}

    def _is_inserted(self, edited: Span) -> bool:
        inside = edited.file == self.file.name
        return inside and any(isinstance(self._offset(place), Span) for place in (edited.start, edited.end))

    def _offset(self, edited: int) -> int | Span:
        """The offset before the edits; of what an edit inserted, the span of its statement."""
        moved = 0
        for edit, statement in self.edits:
            size = len(with_line_ends_of(self.file.text, edit.replacement))
            begin = edit.span.start + moved
            if edited < begin:
                break
            if edited < begin + size:
                return statement
            moved += size - (edit.span.end - edit.span.start)
        return edited - moved


def _distinct(others: Sequence[Label], label: Label) -> Iterator[Label]:
    seen = {label.span}
    for other in others:
        if other.span not in seen:
            seen.add(other.span)
            yield other
