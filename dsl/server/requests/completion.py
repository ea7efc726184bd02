"""Completion at the cursor, from the declarations of the language and from the plan's model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from lsprotocol import types

from legoai.dsl.analysis.domains import RULES, Opening, rules_may_be_open
from legoai.dsl.frontend.parsing.parse import KEYWORDS
from legoai.dsl.frontend.parsing.suppress import SUPPRESSION, suppressible
from legoai.dsl.frontend.syntax import AnyStatement, Let, Name, Statement, Variant
from legoai.dsl.frontend.values.forms import names_of
from legoai.dsl.reporting.reference import OWN_STATEMENTS, treatments_in, value_text
from legoai.dsl.server.cursor import Hole, Place, place_at
from legoai.dsl.server.documents import Checked, Document
from legoai.dsl.server.requests.module_paths import divided, segments
from legoai.dsl.server.requests.pages import owner_of, page_at
from legoai.specs.directives import FAMILIES, family
from legoai.specs.directives.base import Option
from legoai.specs.directives.kinds import REST, Boolean, Integer, Kind, ListOf, ModulePath, parts_of
from legoai.specs.directives.require import COMPARISONS, METRICS
from legoai.specs.models.families import FAMILIES as MODELS
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.record import Record

_Kinds = types.CompletionItemKind


_IN: Final = " in ["
"""Begins the values of a hole's domain."""


class _Item(Record):
    """A completion: its text, its kind, and a short description."""

    text: str
    kind: types.CompletionItemKind
    detail: str = ""
    label: str = ""
    """Its label in the list, where that is not the text."""


def completion(document: Document, offset: int, known: Checked | None) -> types.CompletionList:
    """Return the completions at a character.

    Args:
        document: the newest text.
        offset: of the character.
        known: the last result of linting, maybe of an older version.
    """
    place = place_at(document.text, offset)
    written = document.text[place.start : offset]
    start = place.start + (divided(written)[1] if place.part == "path" else 0)
    if place.part == "comment":
        matched = re.search(r"[A-Za-z0-9-]*\Z", written)
        start = offset - (len(matched[0]) if matched is not None else 0)
    edit = document.positions.range(start, offset)
    items = {item.text: item for item in _items(place, written, document, known)}
    listed = [_protocol(item, edit, number, place) for number, item in enumerate(items.values())]
    return types.CompletionList(is_incomplete=False, items=listed)


def _protocol(item: _Item, edit: types.Range, number: int, place: Place) -> types.CompletionItem:
    word = item.text.removesuffix(_IN).strip(" =(")
    # Modules, files and names of `let` belong to the plan, and have no page.
    has_page = item.kind not in (_Kinds.Module, _Kinds.Variable, _Kinds.File)
    return types.CompletionItem(
        label=item.label or item.text.strip(" ="),
        kind=item.kind,
        detail=item.detail or None,
        text_edit=types.TextEdit(edit, item.text),
        sort_text=f"{number:04}",
        filter_text=item.text,
        data={"word": word, "part": place.part, "owner": owner_of(place)} if has_page else None,
    )


def _items(place: Place, written: str, document: Document, known: Checked | None) -> Iterator[_Item]:
    if place.part == "statement":
        yield from _statements(place)
    elif place.part == "head":
        yield from _head(place, document)
    elif place.part == "axis":
        yield from _axes(place, document)
    elif place.part in ("argument", "value") and place.hole in ("auto", "in", "domain"):
        yield from _of_hole(place.hole)
        if place.hole == "in":  # an end of a range
            yield from _lets(document)
    elif place.part == "argument":
        yield from _arguments(place)
        if place.kind is not None and not isinstance(place.kind, Boolean):
            yield from _values(place.kind, known)
        yield from _lets(document)
    elif place.part == "value":
        yield from _value(place, document, known)
    elif place.part == "path":
        yield from _paths(place, written, known)
    elif place.part == "text":
        yield from _texts(place, written, document)
    elif (comment := SUPPRESSION.search(f"{written}]")) is not None and comment.end() > len(written):
        yield from _codes(document, place.start, known)


def _statements(place: Place) -> Iterator[_Item]:
    for keyword in (*KEYWORDS, *FAMILIES):
        if place.in_variant and keyword in ("plan", "extends", "variant", "solved"):
            continue
        page = OWN_STATEMENTS[keyword][1] if keyword in OWN_STATEMENTS else family(keyword).summary()
        summary = " ".join(page.split()).partition(". ")[0]
        yield _Item(keyword, _Kinds.Keyword, summary)


def _head(place: Place, document: Document) -> Iterator[_Item]:
    keyword = place.keyword
    if keyword in ("require", "minimize", "maximize") and not place.subject:
        for name, metric in METRICS.items():
            yield _Item(name, _Kinds.Property, metric.doc)
    elif keyword == "require":
        bounds = METRICS[place.subject].better if place.subject in METRICS else "less"
        for sign in sorted(COMPARISONS, key=lambda sign: sign[0] != ("<" if bounds == "less" else ">")):
            yield _Item(sign, _Kinds.Operator, label=sign)
    elif keyword == "unset":
        if place.subject == "variant":
            yield from _named(document, Variant)
        elif place.subject == "let":
            yield from _lets(document)
        elif place.subject == "require":
            yield from (_Item(name, _Kinds.Property, metric.doc) for name, metric in METRICS.items())
        elif not place.subject:
            yield from (_Item(word, _Kinds.Keyword) for word in (*FAMILIES, "let", "require", "variant"))
    if keyword not in FAMILIES:
        return
    declared = family(keyword)
    if not place.subject:
        if place.kind is not None:
            yield from _values(place.kind, None)
        for layout in declared.layouts:
            yield _Item(layout.name, _Kinds.EnumMember, "a standard layout")
        if rules_may_be_open(declared, _axes_after(document, place.start)):
            yield _Item("auto", _Kinds.Keyword, "rules that are to be found")
    if declared.axis_use is not None:
        yield _Item("on", _Kinds.Keyword, ", ".join(declared.axis_use.names))


def _axes_after(document: Document, offset: int) -> tuple[str, ...]:
    """The axes of the statement at a character; none where it has none yet."""
    found = (item for item in document.file.statements if isinstance(item, Statement) and item.axes)
    return next(
        (tuple(axis.text for axis in item.axes) for item in found if item.span.start <= offset < item.span.end), ()
    )


def _axes(place: Place, document: Document) -> Iterator[_Item]:
    """Yield the axes that the statement accepts, those of the plan's mesh first."""
    use = family(place.keyword).axis_use if place.keyword in FAMILIES else None
    names = [name for name in (use.names if use is not None else ()) if name not in place.given]
    mesh = {item.text for item in mesh_axes(document.file.statements)}
    for name in sorted(names, key=lambda name: name not in mesh):
        yield _Item(name, _Kinds.EnumMember, "an axis of the mesh" if name in mesh else "not in this plan's mesh")


def mesh_axes(statements: Iterable[AnyStatement]) -> Iterator[Name]:
    """The axes where the plan's mesh, and those of its variants, name them."""
    for statement in statements:
        if isinstance(statement, Variant):
            yield from mesh_axes(statement.statements)
        elif isinstance(statement, Statement) and statement.keyword.text == "mesh" and statement.options is not None:
            yield from (item.name for item in statement.options.items if item.name is not None)


def _arguments(place: Place) -> Iterator[_Item]:
    for option in place.options:
        if option.name not in place.given:
            yield _Item(f"{option.name} = ", _Kinds.Field, option.doc)
    if place.keyword == "model" and place.subject in MODELS:
        for item in MODELS[place.subject].config_class.__dataclass_fields__.values():
            if item.name not in place.given:
                yield _Item(f"{item.name} = ", _Kinds.Field, item.metadata["doc"])


def _value(place: Place, document: Document, known: Checked | None) -> Iterator[_Item]:
    if place.kind is not None:
        option = place.option
        first = _default(option)
        items = list(_values(place.kind, known))
        if place.hole == "answer":
            items = [item for item in items if item.text != REST]
        yield from sorted(items, key=lambda item: item.text != first)
        if place.hole != "answer":
            yield from _open(place, known)
    if place.in_variant and place.owner is None and place.keyword in FAMILIES:
        yield _Item("unset", _Kinds.Keyword, "takes the rule of the same path away")
    yield from _lets(document)


def _open(place: Place, known: Checked | None) -> Iterator[_Item]:
    """Yield `auto` where `legoai solve` finds a value, with a domain where it needs one."""
    assert place.kind is not None, "only statements with options have values of a kind"
    owner = place.owner or family(place.keyword)
    field = RULES if place.option is None else place.option.field
    opening = Opening(
        keyword=place.keyword, owner=owner, field=field, kind=place.kind, in_list=place.in_list, axes=place.axes,
        path=place.path,
    )  # fmt: skip
    linted = None if known is None else known.linted
    if not opening.is_searched:
        return
    if opening.needs_domain(None if linted is None else linted.analysis):
        yield _Item(f"auto{_IN}", _Kinds.Keyword, "a value that `legoai solve` finds among these", "auto in […]")
    else:
        yield _Item("auto", _Kinds.Keyword, "a value that `legoai solve` finds")


def _of_hole(hole: Hole) -> Iterator[_Item]:
    """What may follow `auto`, `auto in` and a domain."""
    if hole == "in":
        yield _Item("[", _Kinds.Operator, "the values to choose from", "[…]")
    if hole == "auto":
        yield _Item("in ", _Kinds.Keyword, "the values to choose from")
    if hole != "in":
        yield _Item("-> ", _Kinds.Operator, "the answer, which `legoai solve` writes", "->")


def _default(option: Option | None) -> str | None:
    known = option is not None and not option.required and option.default is not None
    return value_text(option.default, option.kind) if known and option is not None else None


def _values(kind: Kind, known: Checked | None) -> Iterator[_Item]:
    """The values of a kind that have names."""
    calls = {treatment.name: treatment for treatment in treatments_in(kind)}
    for part in parts_of(kind):
        if isinstance(part, Boolean):
            yield from (_Item(word, _Kinds.Value) for word in ("true", "false"))
        elif isinstance(part, Integer) and part.rest:
            yield _Item(REST, _Kinds.Value, "what makes the product whole")
        elif isinstance(part, ListOf):
            inner = list(_values(part.item, None))
            if inner:
                yield _Item("[", _Kinds.Operator, part.describe(), "[…]")
        elif isinstance(part, ModulePath):
            yield from _modules(known)
    for name in names_of(kind):
        treatment = calls.get(name)
        needs = treatment is not None and any(item.required for item in treatment.options)
        detail = "" if treatment is None else treatment.summary()
        what = _Kinds.EnumMember if treatment is None else _Kinds.Function
        yield _Item(f"{name}(" if needs else name, what, detail, name + ("(…)" if needs else ""))


def _modules(known: Checked | None) -> Iterator[_Item]:
    """The blocks of a model, at which its stages may be cut."""
    manifest = manifest_of(known)
    for blocks in manifest.block_lists if manifest is not None else ():
        for name in blocks.names:
            yield _Item(f"{blocks.path}.{name}", _Kinds.Module)


def _lets(document: Document) -> Iterator[_Item]:
    return _named(document, Let)


def _named(document: Document, kind: type[Let] | type[Variant]) -> Iterator[_Item]:
    for item in document.file.statements:
        if isinstance(item, kind):
            first = document.text[item.span.start : item.span.end].partition("\n")[0]
            yield _Item(item.name.text, _Kinds.Variable, first)


def manifest_of(known: Checked | None) -> Manifest | None:
    """Return the manifest of a document's model, where it is known."""
    linted = None if known is None else known.linted
    return None if linted is None or linted.analysis is None else linted.analysis.manifest


def _paths(place: Place, written: str, known: Checked | None) -> Iterator[_Item]:
    manifest = manifest_of(known)
    if manifest is None:
        return
    parameters = place.keyword in FAMILIES and family(place.keyword).names_parameters
    for item in segments(manifest, written, parameters=parameters):
        yield _Item(item.text, _Kinds.Module, item.what)


def _texts(place: Place, written: str, document: Document) -> Iterator[_Item]:
    """Presets of a model, and plans that may be extended."""
    if place.keyword == "extends":
        folder = written.rpartition("/")[0]
        try:
            inside = sorted(document.directory.joinpath(folder).iterdir())
        except (OSError, ValueError):
            return
        for path in inside:
            if path.suffix == ".plan" and path != document.path:
                yield _Item(f"{folder}/{path.name}" if folder else path.name, _Kinds.File)
    is_preset = place.option is not None and place.option.field == "target"
    if place.keyword == "model" and place.subject in MODELS and is_preset:
        for preset in MODELS[place.subject].presets:
            yield _Item(preset, _Kinds.EnumMember, f'{place.subject}("{preset}")')


def _codes(document: Document, start: int, known: Checked | None) -> Iterator[_Item]:
    """Yield the diagnostics of a comment's line, or of the next line for a comment on a line of its own."""
    positions = document.positions
    line = positions.line_of(start)
    for item in known.diagnostics if known is not None else ():
        if (
            item.label.span.file == document.name
            and item.label.span.line in (line + 1, line + 2)
            and suppressible(item)
        ):
            yield _Item(item.code, _Kinds.Reference, item.message)


def documented(item: types.CompletionItem) -> types.CompletionItem:
    """The item with its page."""
    data = item.data
    if isinstance(data, dict):
        page = page_at(data.get("word", ""), data.get("part"), data.get("owner", ""))
        if page is not None:
            item.documentation = types.MarkupContent(types.MarkupKind.Markdown, page)
    return item


TRIGGERS: Final = (".", "(", "{", "[", '"', "=", ",", " ")
"""Characters after which an editor requests completion by itself."""
