"""Changes: the values in which two resolved plans differ, each of which can be applied alone to the first of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

from legoai.dsl.frontend.paths import ROOT
from legoai.dsl.reporting.reference import value_text
from legoai.specs.directives.base import Declared, Directive, PathRule, Treatment, describe
from legoai.specs.directives.hole import Hole
from legoai.specs.directives.kinds import Kind
from legoai.specs.directives.model import Model
from legoai.specs.directives.require import Objective, Requirement
from legoai.specs.plan import Plan
from legoai.specs.record import Record, replace
from legoai.specs.span import Span

Presence = Literal["added", "removed", "changed"]
Part = Literal["name", "statement", "axes", "option", "argument", "rule", "require", "objective", "file"]
"""The part of a plan that a change affects."""

DEFAULT_TEXT: Final = "by default"
"""The text of a value that is derived from the rest of the plan."""

_NOT_COMPARED: Final = ("name", "shard", "require", "objective", "variant", "solved", "files", "idle")
"""Fields of a plan that are not compared as one statement."""

DIGEST: Final = 19
"""Characters of a file's digest in the output."""

_MANY: Final = 2
"""Most options of a treatment that is compared as a whole."""

T = TypeVar("T", bound=Declared)


class Key(Record):
    """The place of a value in a plan: equal keys denote the same value of two plans.

    ``field`` is that of :class:`Plan`; ``axes`` distinguishes statements with one keyword; ``names`` are the names of
    the option and of the option within its treatment, of the argument, of the figure or of the file, or the path of a
    rule. ``index`` counts rules of one path.
    """

    part: Part
    field: str
    axes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    index: int = 0


class Change(Record, kw_only=True):
    """One value in which two plans differ.

    Attributes:
        key: the value's place.
        statement: the statement of the value, as a plan writes it: `mesh`, `shard on tp`.
        what: the option, the path of the rule or the name of the argument; empty for the whole statement.
        kind: whether the second plan adds, removes or changes it.
        before: the value in the first plan, as a plan writes it; None where it has none.
        after: the value in the second plan.
        before_at: its place in the first plan; None for a default.
        after_at: its place in the second plan.
        variant: the variant that alone has this difference; None for the plan itself.
    """

    key: Key
    statement: str
    what: str = ""
    kind: Presence
    before: str | None
    after: str | None
    before_at: Span | None = None
    after_at: Span | None = None
    variant: str | None = None

    @property
    def subject(self) -> str:
        """The changed value, in words: `mesh tp`, `fsdp on dp_shard layers.*`."""
        inside = f"variant {self.variant}: " if self.variant is not None else ""
        return f"{inside}{self.statement} {self.what}".rstrip()

    @property
    def line(self) -> str:
        """The change in one line: `mesh tp: 4 → 8`."""
        if self.kind == "changed":
            return f"{self.subject}: {self.before} → {self.after}"
        value = self.after if self.kind == "added" else self.before
        return f"{self.subject}: {self.kind}" + (f", {value}" if value else "")


def changes(before: Plan, after: Plan) -> tuple[Change, ...]:
    """The values in which two plans differ, in the language's order; none where they mean the same.

    Formatting, comments, the order of statements and rules, `let` names, base plans, the solver's line, a default that
    is written out and a statement of nothing but such defaults make no difference.
    """
    found = list(_changes(before, after))
    if before.canonical_json() == after.canonical_json():
        # Such plans can differ only in requirements and objective.
        return tuple(item for item in found if item.key.part in ("require", "objective"))
    # The memory limit is a requirement, and part of the plan where passes over a graph observe it.
    assert any(item.key.part != "objective" for item in found), "a difference without a change"
    return tuple(found)


def _changes(before: Plan, after: Plan) -> Iterator[Change]:
    if before.name != after.name:
        yield _changed(Key("name", "name"), "plan", "", before.name, after.name)
    for field in Plan.fields_:
        if field == "shard":
            axes = dict.fromkeys(item.axes for item in (*before.shard, *after.shard))
            for on in axes:
                yield from _of_statement(field, on, _shard(before, on), _shard(after, on))
        elif field not in _NOT_COMPARED:
            yield from _of_statement(field, (), getattr(before, field), getattr(after, field))
    yield from _requirements(before.require, after.require)
    yield from _objectives(before.objective, after.objective)
    held, found = dict(before.files), dict(after.files)
    for name in held.keys() & found.keys():
        if held[name] != found[name]:
            yield _changed(
                Key("file", "files", names=(name,)), "file", f'"{name}"', held[name][:DIGEST], found[name][:DIGEST]
            )


def _changed(key: Key, statement: str, what: str, before: str, after: str) -> Change:
    return Change(key=key, statement=statement, what=what, kind="changed", before=before, after=after)


def _shard(plan: Plan, axes: tuple[str, ...]) -> Directive | None:
    return next((item for item in plan.shard if item.axes == axes), None)


def _of_statement(
    field: str, axes: tuple[str, ...], before: Directive | None, after: Directive | None
) -> Iterator[Change]:
    if before is None or after is None:
        held = before if after is None else after
        if held is not None and not held.is_neutral:
            yield Change(
                key=Key("statement", field, axes),
                statement=_head(held),
                kind="removed" if after is None else "added",
                before=_body(before) if before is not None else None,
                after=_body(after) if after is not None else None,
                before_at=before.span_of("keyword") if before is not None else None,
                after_at=after.span_of("keyword") if after is not None else None,
            )
        return
    if isinstance(before, Model) and (before.family, before.target) != (after.family, after.target):  # type: ignore[attr-defined]
        yield Change(
            key=Key("statement", field),
            statement=field,
            kind="changed",
            before=_body(before),
            after=_body(after),
            before_at=before.span_of("family"),
            after_at=after.span_of("family"),
        )
        return
    if before.axes != after.axes:
        yield Change(
            key=Key("axes", field, axes),
            statement=field,
            what="on",
            kind="changed",
            before=", ".join(before.axes),
            after=", ".join(after.axes),
            before_at=before.span_of("axes"),
            after_at=after.span_of("axes"),
        )
    yield from _options(field, axes, before, after)
    yield from _arguments(field, axes, before, after)
    yield from _rules(field, axes, before, after)


def parts(change: Change, before: Plan, after: Plan) -> Iterator[Change]:
    """The options and rules of a statement that only one plan has, as changes of a statement that has the defaults."""
    key = change.key
    sides = [_shard(plan, key.axes) if key.field == "shard" else getattr(plan, key.field) for plan in (before, after)]
    held = next((one for one in sides if one is not None), None)
    if held is not None and None in sides:
        yield from _of_statement(key.field, key.axes, held.bare(), held)


def _options(field: str, axes: tuple[str, ...], before: Directive, after: Directive) -> Iterator[Change]:
    for item in type(before).options:
        old, new = getattr(before, item.field), getattr(after, item.field)
        if describe(old) == describe(new):
            continue
        names = (item.field,)
        if isinstance(old, Treatment) and type(old) is type(new) and len(old.options) > _MANY:
            for inner in old.options:
                values = getattr(old, inner.field), getattr(new, inner.field)
                if describe(values[0]) != describe(values[1]):
                    key = Key("option", field, axes, (*names, inner.field))
                    texts = [text_of(value, inner.kind) for value in values]
                    spans = old.origin(inner.field).span, new.origin(inner.field).span
                    yield _either(key, _head(before), inner.name, texts, spans)
            continue
        # The subject of a statement directly follows its keyword, without a name.
        what = "" if item.field == before.subject and not before.subject_holds_options else item.name
        spans = before.origin(item.field).span, after.origin(item.field).span
        texts = [text_of(value, item.kind) for value in (old, new)]
        yield _either(Key("option", field, axes, names), _head(before), what, texts, spans)


def _arguments(field: str, axes: tuple[str, ...], before: Directive, after: Directive) -> Iterator[Change]:
    for name in dict.fromkeys((*before.arguments, *after.arguments)):
        texts = [_scalar(item.arguments[name]) if name in item.arguments else None for item in (before, after)]
        if texts[0] != texts[1]:
            yield _either(
                Key("argument", field, axes, (name,)),
                _head(before),
                name,
                texts,
                (before.span_of(name), after.span_of(name)),
            )


def _either(
    key: Key, statement: str, what: str, texts: Sequence[str | None], spans: tuple[Span | None, Span | None]
) -> Change:
    """The change of a value that at least one of the plans has."""
    kind: Presence = "added" if texts[0] is None else "removed" if texts[1] is None else "changed"
    return Change(
        key=key,
        statement=statement,
        what=what,
        kind=kind,
        before=texts[0],
        after=texts[1],
        before_at=spans[0] if texts[0] is not None else None,
        after_at=spans[1] if texts[1] is not None else None,
    )


def _rules(field: str, axes: tuple[str, ...], before: Directive, after: Directive) -> Iterator[Change]:
    kind = type(before).treatments
    if kind is None:
        return
    old, new = rules_by_path(before), rules_by_path(after)
    for place in dict.fromkeys((*old, *new)):
        rules = old.get(place), new.get(place)
        described = [None if rule is None else describe(rule) for rule in rules]
        if described[0] != described[1]:
            texts = [None if rule is None else text_of(rule.treatment, kind) for rule in rules]
            spans = [None if rule is None else rule.origin.span for rule in rules]
            path, index = place
            key = Key("rule", field, axes, (path,), index)
            yield _either(key, _head(before), path or ROOT, texts, (spans[0], spans[1]))


def rules_by_path(directive: Directive) -> dict[tuple[str, int], PathRule[Any]]:
    """The rules of a statement by path, and by an index where several have the same."""
    found: dict[tuple[str, int], PathRule[Any]] = {}
    for rule in sorted(directive.rules, key=lambda rule: json.dumps(describe(rule), sort_keys=True)):
        index = sum(path == rule.path for path, _ in found)
        found[rule.path, index] = rule
    order = {id(rule): position for position, rule in enumerate(directive.rules)}
    return dict(sorted(found.items(), key=lambda item: order[id(item[1])]))


def _requirements(before: Sequence[Requirement], after: Sequence[Requirement]) -> Iterator[Change]:
    old, new = ({item.key: item for item in items} for items in (before, after))
    for place in dict.fromkeys((*old, *new)):
        items = old.get(place), new.get(place)
        texts = [None if item is None else item.limit for item in items]
        if texts[0] != texts[1]:
            spans = [None if item is None else item.origin.span for item in items]
            yield _either(Key("require", "require", names=place), "require", place[0], texts, (spans[0], spans[1]))


def _objectives(before: Objective | None, after: Objective | None) -> Iterator[Change]:
    texts = [None if item is None else f"{item.direction} {item.metric}" for item in (before, after)]
    if texts[0] != texts[1]:
        spans = [None if item is None else item.origin.span for item in (before, after)]
        yield _either(Key("objective", "objective"), "objective", "", texts, (spans[0], spans[1]))


def text_of(value: Any, kind: Kind) -> str:
    """A value as a plan writes it; a hole with its domain."""
    if value is None:
        return DEFAULT_TEXT
    if isinstance(value, Hole):
        if isinstance(value.domain, range):
            return f"auto in {value.domain[0]}..{value.domain[-1]}"
        if value.domain is None:
            return "auto"
        return f"auto in [{', '.join(value_text(item, kind) for item in value.domain)}]"
    return value_text(value, kind)


def _scalar(value: Any) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


def _head(directive: Directive) -> str:
    """A statement's keyword, with the axis where several may have it."""
    axes = f" on {', '.join(directive.axes)}" if directive.axes and directive.repeats_by_axis else ""
    return f"{directive.keyword}{axes}"


def _body(directive: Directive) -> str:
    """The text of a statement after its head."""
    return statement_text(directive).removeprefix(_head(directive)).lstrip()


def statement_text(directive: Directive) -> str:
    """A statement in one line, without defaults."""
    words = [directive.keyword]
    options = [
        item
        for item in directive.options
        if not item.is_default(describe(getattr(directive, item.field), defaults=False))
    ]
    subject = next((item for item in options if item.field == directive.subject), None)
    named = [
        f"{item.name} = {text_of(getattr(directive, item.field), item.kind)}" for item in options if item != subject
    ]
    named += [f"{name} = {_scalar(value)}" for name, value in directive.arguments.items()]
    if isinstance(directive, Model):
        # The preset, factory or config precedes the arguments, without its name.
        named = [item.removeprefix("target = ") for item in named]
    if subject is not None:
        words.append(text_of(getattr(directive, subject.field), subject.kind))
        if directive.subject_holds_options and named:
            words[-1] += f"({', '.join(named)})"
            named = []
    if directive.axes:
        words.append(f"on {', '.join(directive.axes)}")
    if named:
        words.append(f"({', '.join(named)})")
    if directive.rules and directive.treatments is not None:
        rules = [f"{rule.path} = {text_of(rule.treatment, directive.treatments)}" for rule in directive.rules]
        words.append(f"{{ {', '.join(rules)} }}")
    return " ".join(words)


def applied(before: Plan, after: Plan, chosen: Iterable[Change]) -> Plan:
    """The first plan with some of its changes to the second. Values keep the spans of the plan that they are from.

    Args:
        before: the first plan.
        after: the second plan.
        chosen: some of :func:`changes` of the two.
    """
    by_statement: dict[tuple[str, tuple[str, ...]], list[Key]] = {}
    for change in chosen:
        by_statement.setdefault((change.key.field, change.key.axes), []).append(change.key)
    fields: dict[str, Any] = {}
    shards: dict[tuple[str, ...], Any] = {item.axes: item for item in before.shard}
    for (field, axes), keys in by_statement.items():
        if field == "require":
            fields[field] = _applied_requirements(before.require, after.require, {key.names for key in keys})
        elif field == "files":
            names = {key.names[0] for key in keys}
            held = dict(before.files) | {name: value for name, value in after.files if name in names}
            fields[field] = tuple(sorted(held.items()))
        elif field == "shard":
            made = _applied(_shard(before, axes), _shard(after, axes), keys)
            shards = {**shards, axes: made} if made is not None else _without(shards, axes)
        elif field in ("name", "objective"):
            fields[field] = getattr(after, field)
        else:
            fields[field] = _applied(getattr(before, field), getattr(after, field), keys)
    if {"model", "pipeline"} & fields.keys():
        # A file that only the second plan names is looked up relative to that plan.
        held = dict(fields.get("files", before.files))
        fields["files"] = tuple(sorted((dict(after.files) | held).items()))
    order = [item.axes for item in (*after.shard, *before.shard)]
    fields["shard"] = tuple(sorted(shards.values(), key=lambda item: order.index(item.axes)))
    return replace(before, **fields)


def _without(shards: Mapping[tuple[str, ...], Any], axes: tuple[str, ...]) -> dict[tuple[str, ...], Any]:
    return {on: item for on, item in shards.items() if on != axes}


def _applied_requirements(
    before: Sequence[Requirement], after: Sequence[Requirement], places: set[tuple[str, ...]]
) -> tuple[Requirement, ...]:
    def changed(item: Requirement) -> bool:
        return item.key in places

    return (*(item for item in before if not changed(item)), *(item for item in after if changed(item)))


def _applied(before: Directive | None, after: Directive | None, keys: Sequence[Key]) -> Directive | None:
    if before is None or after is None or any(key.part == "statement" for key in keys):
        return after
    options = [key.names for key in keys if key.part == "option"]
    arguments, origins = dict(before.arguments), dict(before.origins)
    rules = rules_by_path(before)
    for key in keys:
        if key.part == "argument":
            [name] = key.names
            arguments.pop(name, None)
            if name in after.arguments:
                arguments[name] = after.arguments[name]
            _take_origin(origins, after.origins, name)
        elif key.part == "rule":
            place = (key.names[0], key.index)
            new = rules_by_path(after).get(place)
            if new is None:
                del rules[place]
            else:
                rules[place] = new
        elif key.part == "axes":
            _take_origin(origins, after.origins, "axes")
    extra = {
        "axes": after.axes if any(key.part == "axes" for key in keys) else before.axes,
        "rules": tuple(rules.values()),
        "arguments": arguments,
    }
    return _with_options(before, after, options, origins, extra)


def _with_options(
    before: T, after: Declared, names: Sequence[tuple[str, ...]], origins: dict[str, Any], extra: Mapping[str, Any]
) -> T:
    """The declared value with the options of another at ``names``, each a field or a field and one of its treatment."""
    values = {item.field: getattr(before, item.field) for item in before.options}
    for field in dict.fromkeys(name[0] for name in names):
        inner = [name[1:] for name in names if name[0] == field and name[1:]]
        old, new = getattr(before, field), getattr(after, field)
        if inner:
            values[field] = _with_options(old, new, inner, dict(old.origins), {})
        else:
            values[field] = new
            _take_origin(origins, after.origins, field)
    return type(before)(**values, **extra, origins=origins)


def _take_origin(origins: dict[str, Any], others: Mapping[str, Any], name: str) -> None:
    origins.pop(name, None)
    if name in others:
        origins[name] = others[name]
