"""Code actions: fixes of diagnostics, comments that suppress them, and rewrites at the cursor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from lsprotocol import types

from legoai.dsl.config import reported
from legoai.dsl.diagnostics.codes.names import FactoryNotRun
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Fix
from legoai.dsl.fixing import fixed
from legoai.dsl.formatting.expand import written_out
from legoai.dsl.frontend.files.sources import Source
from legoai.dsl.frontend.parsing.suppress import suppressible, suppressions
from legoai.dsl.frontend.syntax import Name, Statement
from legoai.dsl.rules.hygiene import MalformedSuppression, UnusedSuppression
from legoai.dsl.server.documents import Checked, Checking, Document, factory_of, linted_as, uri_of
from legoai.dsl.server.positions import Positions, replacement
from legoai.dsl.server.published import published_form, range_of

FIX_ALL: Final = "source.fixAll.legoai"
RUN_FACTORY: Final = "legoai.runFactory"
KINDS: Final = (types.CodeActionKind.QuickFix, types.CodeActionKind.RefactorRewrite, FIX_ALL)


def wanted(kinds: Sequence[str] | None, kind: str) -> bool:
    """Whether a client requests actions of a kind: all, this one, or one that includes it."""
    return kinds is None or any(kind == only or kind.startswith(f"{only}.") or not only for only in kinds)


def actions(checked: Checked, start: int, end: int, kinds: Sequence[str] | None) -> Iterator[types.CodeAction]:
    """The actions on the characters from ``start`` up to ``end``, but for fixing all."""
    if wanted(kinds, types.CodeActionKind.QuickFix):
        # All are looked at, not only as many as an editor draws.
        found = [item for item in checked.diagnostics if _touches(item, checked, start, end)]
        here = [(item, published_form(item, checked)) for item in found]
        for item, shown in here:
            yield from _of_fix(item, shown, checked)
            yield from _of_factory(item, shown, checked)
        for item, shown in here:
            yield from _of_suppression(item, shown, checked)
    if wanted(kinds, types.CodeActionKind.RefactorRewrite):
        yield from _of_layout(checked, start, end)


def fix_all(checked: Checked, checking: Checking) -> types.CodeAction | None:
    """Return the action that applies every safe fix, as `legoai lint --fix` does; None if there is nothing to fix."""
    document, linted = checked.document, checked.linted
    if linted is None:
        return None
    text, _ = fixed(
        Source(document.name, document.text, document.path),
        linted,
        lambda text: linted_as(document, text, checking),
        lambda item: reported(item, checked.configuration),
        unsafe=False,
    )
    edits = replacement(document.positions, text)
    if not edits:
        return None
    return types.CodeAction("Apply all safe fixes", kind=FIX_ALL, edit=types.WorkspaceEdit({document.uri: edits}))


def _touches(item: Diagnostic, checked: Checked, start: int, end: int) -> bool:
    positions, place = checked.document.positions, range_of(item, checked)
    return positions.offset(place.start) <= end and start <= positions.offset(place.end)


def _of_fix(item: Diagnostic, shown: types.Diagnostic, checked: Checked) -> Iterator[types.CodeAction]:
    if item.fix is not None:
        title = item.fix.title[:1].upper() + item.fix.title[1:]
        yield types.CodeAction(
            title if item.fix.safe else f"{title} (unsafe: decides something)",
            kind=types.CodeActionKind.QuickFix,
            diagnostics=[shown],
            is_preferred=item.fix.safe,
            edit=_edit(item.fix, checked),
        )


def _edit(fix: Fix, checked: Checked) -> types.WorkspaceEdit:
    document = checked.document
    changes: dict[str, list[types.TextEdit]] = {}
    for edit in fix.edits:
        file = checked.files[edit.span.file]
        own = file.name == document.name
        uri = document.uri if own else uri_of(Path(file.name))
        place = document.positions_of(file).of(edit.span)
        changes.setdefault(uri, []).append(types.TextEdit(place, edit.replacement))
    return types.WorkspaceEdit(changes)


def _of_factory(item: Diagnostic, shown: types.Diagnostic, checked: Checked) -> Iterator[types.CodeAction]:
    """Yield the action that runs a factory on the user's request."""
    target = factory_of(checked.linted) if checked.linted is not None else None
    if item.code == FactoryNotRun.code and target is not None:
        directory = str(checked.document.directory)
        title = f"Run the model factory {target} to check what depends on the model"
        command = types.Command(title, RUN_FACTORY, arguments=[directory, target])
        yield types.CodeAction(
            title, kind=types.CodeActionKind.QuickFix, diagnostics=[shown], command=command
        )  # fmt: skip


def _of_suppression(item: Diagnostic, shown: types.Diagnostic, checked: Checked) -> Iterator[types.CodeAction]:
    """Yield the action that adds a comment which accepts a diagnostic to its line."""
    document = checked.document
    is_own = item.label.span.file == document.name
    if not is_own or not suppressible(item) or item.code in (UnusedSuppression.code, MalformedSuppression.code):
        return
    positions = document.positions
    end = positions.line_end(positions.line_of(item.label.span.start))
    yield types.CodeAction(
        f"Ignore {item.code} {item.slug} here",
        kind=types.CodeActionKind.QuickFix,
        diagnostics=[shown],
        edit=types.WorkspaceEdit({document.uri: [_ignoring(document, positions, end, item.code)]}),
    )


def _ignoring(document: Document, positions: Positions, end: int, code: str) -> types.TextEdit:
    """Return the edit that adds a code to the comment of a line, or such a comment to the line."""
    line = positions.line_of(end)
    codes = [item.span for item in suppressions(document.file) if positions.line_of(item.span.start) == line]
    if codes:
        return types.TextEdit(positions.range(codes[-1].end, codes[-1].end), f", {code}")
    start = len(document.text[:end].rstrip(" \t"))
    return types.TextEdit(positions.range(start, end), f"  # legoai: ignore[{code}]")


def _of_layout(checked: Checked, start: int, end: int) -> Iterator[types.CodeAction]:
    """Yield the actions that replace names of standard layouts by their rules, of the statements that are touched."""
    document, linted = checked.document, checked.linted
    if linted is None:
        return
    for statement in document.file.statements:
        if not isinstance(statement, Statement) or statement.span.end < start or end < statement.span.start:
            continue
        text = written_out(statement, linted.resolution)
        if text is not None:
            name = statement.subject.text if isinstance(statement.subject, Name) else "layout"
            edit = types.TextEdit(document.positions.of(statement.span), text)
            yield types.CodeAction(
                f"Write out the rules of `{name}`",
                kind=types.CodeActionKind.RefactorRewrite,
                edit=types.WorkspaceEdit({document.uri: [edit]}),
            )
