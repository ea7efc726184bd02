"""Hover: the output of `legoai explain` for the word, path or hole at the cursor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lsprotocol import types

from legoai.dsl.diagnostics.codes.lowering import HoleNotSearched
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.formatting.edit import holes
from legoai.dsl.formatting.expand import written_out
from legoai.dsl.formatting.unparse import value_on_one_line
from legoai.dsl.frontend.parsing.suppress import suppressions
from legoai.dsl.frontend.syntax import Let, ListValue, PathText, PlanFile, Range, Statement
from legoai.dsl.frontend.values.ranges import resolved_path
from legoai.dsl.open_plan import OpenPlan
from legoai.dsl.reporting.explain import explain
from legoai.dsl.rules import rule_of
from legoai.dsl.server.cursor import Place, word_at
from legoai.dsl.server.documents import Checked, Checking, Document
from legoai.dsl.server.requests.completion import manifest_of
from legoai.dsl.server.requests.module_paths import matching
from legoai.dsl.server.requests.navigation import use_at
from legoai.dsl.server.requests.pages import owner_of, page_at, page_of_option
from legoai.specs.directives import FAMILIES, family

_SHOWN: Final = 6
"""Modules that are listed."""
_CHOICES: Final = 24
"""Values of a hole that are listed."""
_SOUGHT: Final = "a value that `legoai solve` finds"
"""What a hole is, where nothing more is known of it."""


def hover(checked: Checked, offset: int, checking: Checking) -> types.Hover | None:
    """Return the text for a character."""
    document = checked.document
    place, end = word_at(document.text, offset)
    start = place.start
    if place.part == "comment":
        return _suppressed(document, offset)
    use = use_at(checked, offset) if place.part == "path" else None
    if use is not None and use.sort == "let":
        start, end = use.span.start, use.span.end
        text = _let(use.name, checked)
    elif place.part == "path":
        text = _path(document.text[start:end], place, checked)
    else:
        text = _word(document.text[start:end], place, checked, offset, checking)
    if not text:
        return None
    return types.Hover(types.MarkupContent(types.MarkupKind.Markdown, text), document.positions.range(start, end))


def _word(word: str, place: Place, checked: Checked, offset: int, checking: Checking) -> str:
    if not word:
        return ""
    if word == "auto":
        return _hole(checked, offset, place, checking)
    if place.part != "statement" and (defined := _let(word, checked)):
        return defined
    option = "" if place.option is None else place.option.name
    return (
        _layout(word, place, checked)
        or page_of_option(word, place)
        or page_at(word, place.part, owner_of(place), option)
        or ""
    )


def _let(name: str, checked: Checked) -> str:
    """The statement that defines a name: that of the document, else of a plan that it extends."""
    for file in (checked.document.file, *checked.files.values()):
        for item in file.statements:
            if isinstance(item, Let) and item.name.text == name:
                return f"```\n{file.text[item.span.start : item.span.end]}\n```\n"
    return ""


def _layout(word: str, place: Place, checked: Checked) -> str | None:
    """Return the rules that the name of a standard layout stands for."""
    is_layout = place.keyword in FAMILIES and any(item.name == word for item in family(place.keyword).layouts)
    if place.part != "head" or not is_layout or checked.linted is None:
        return None
    for statement in checked.document.file.statements:
        if isinstance(statement, Statement) and statement.span.start <= place.start < statement.span.end:
            rules = written_out(statement, checked.linted.resolution)
            return None if rules is None else f"`{word}` stands for\n\n```\n{rules}\n```\n"
    return None


def _suppressed(document: Document, offset: int) -> types.Hover | None:
    """The page of the diagnostic that a comment suppresses."""
    for item in suppressions(document.file):
        if item.span.start <= offset <= item.span.end and rule_of(item.code) is not None:
            content = types.MarkupContent(types.MarkupKind.Markdown, page_at(item.code) or "")
            return types.Hover(content, document.positions.of(item.span))
    return None


def _path(path: str, place: Place, checked: Checked) -> str:
    """Return the modules that a path matches, and the plan's treatment of the first of them."""
    manifest = manifest_of(checked)
    linted = checked.linted
    if manifest is None or linted is None or linted.analysis is None:
        return ""
    computed = resolved_path(PathText(path, linted.resolution.start), linted.resolution.scope)
    parameters = place.keyword in FAMILIES and family(place.keyword).names_parameters
    names = [] if isinstance(computed, Diagnostic) else matching(manifest, computed, parameters=parameters)
    if not names:
        return f"`{path}` matches no module of the model.\n"
    said = explain(linted.analysis, names[0] or "root")
    listed = [f"`{name or 'root'}`" for name in names]
    if len(listed) > _SHOWN:
        listed = [*listed[: _SHOWN - 2], "…", listed[-1]]
    head = "" if len(names) == 1 else f"`{path}` matches {len(names)}: {', '.join(listed)}. The first of them:\n\n"
    return f"{head}```\n{said}```\n"


def _hole(checked: Checked, offset: int, place: Place, checking: Checking) -> str:
    """The values from which a hole is filled."""
    document, linted = checked.document, checked.linted
    hole = next((item for item in holes(document.file) if item.span.start <= offset <= item.span.end), None)
    legal = f"Legal values: {place.kind.describe()}." if place.kind is not None else ""
    if hole is None or linted is None:
        return f"`auto`: {_SOUGHT}. {legal}\n"
    refused = [item for item in linted.diagnostics if item.code == HoleNotSearched.code]
    # Without an analysis the open plan would look at the model, and maybe run its factory.
    if not linted.has_errors and linted.analysis is not None:
        opened = OpenPlan(linted, directory=document.directory, read=checking.read)
        known = next((item for item in opened.holes if item.span == hole.span), None)
        if known is not None:
            return f"`auto`: {known.what}\n\n{_choice(known.choices, known.answer)}\n"
        refused = opened.refused
    problem = next((item.message for item in refused if item.label.span == hole.span), None)
    if problem is None and hole.domain is not None:
        answer = None if hole.answer is None else value_on_one_line(document.file, hole.answer)
        return f"`auto`: {_SOUGHT}.\n\n{_choice(_listed(hole.domain, document.file), answer)}\n"
    return f"`auto`: {problem or _SOUGHT}. {legal}\n"


def _choice(values: Sequence[str], answer: str | None) -> str:
    """The values that a hole may take, and the answer that it has."""
    more = f" and {len(values) - _CHOICES} more" if len(values) > _CHOICES else ""
    answered = f"\n\nIts answer is `{answer}`." if answer is not None else ""
    return f"`legoai solve` chooses among {', '.join(f'`{value}`' for value in values[:_CHOICES])}{more}.{answered}"


def _listed(domain: ListValue | Range, file: PlanFile) -> list[str]:
    """A domain as it is written: in a plan with errors, the ends of a range may have no value."""
    if isinstance(domain, ListValue):
        return [value_on_one_line(file, item) for item in domain.items]
    return [file.text[domain.span.start : domain.span.end]]
