"""Standard layouts: expansion of `shard standard on tp` and `fsdp blocks on dp_shard` into rules."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from legoai.dsl.diagnostics.codes import names as rules
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.frontend.parsing.parse import parse
from legoai.dsl.frontend.statements.merge import nothing_to_unset, takes_away
from legoai.dsl.frontend.syntax import Argument, Block, Name, RuleLine, Statement
from legoai.dsl.frontend.values.arguments import Reader
from legoai.specs.directives.base import Directive, Treatment
from legoai.specs.directives.hole import Hole
from legoai.specs.record import Record, replace
from legoai.specs.span import Span

if TYPE_CHECKING:
    from legoai.specs.directives.model import Model
    from legoai.specs.models.layouts import LayoutRule, StandardLayouts

T = TypeVar("T")
_CHOICE: Final = re.compile(r"\{([^{}]*,[^{}]*)\}")


def layout_named(statement: Statement, declared: type[Directive]) -> type[Treatment] | None:
    """The standard layout that the statement names, if it names one."""
    word = statement.subject.text if isinstance(statement.subject, Name) else None
    return next((layout for layout in declared.layouts if layout.name == word), None)


def with_rules(
    statement: Statement,
    declared: type[Directive],
    model: Model | None,
    directory: Path,
    reader: Reader,
    *,
    place: Span | None = None,
) -> Statement | None:
    """Return the statement with the rules of its standard layout inserted before its own.

    A rule of its own replaces the layout's rule for the same path, or for the same alternative of a path; `PATH =
    unset` removes that.

    Args:
        statement: names a layout, by :func:`layout_named`.
        declared: its family.
        model: whose layout is used; None where it could not be read.
        directory: base of relative config file names.
        reader: reads the layout's options, and collects diagnostics.
        place: the span of the layout's rules; by default the word that names the layout.

    Returns:
        The statement without the layout's name and options; None, after a diagnostic, where the model has no such
        layout.
    """
    layout = layout_named(statement, declared)
    assert layout is not None
    assert statement.subject is not None
    given = statement.options.items if statement.options is not None else ()
    own, rest = _divided(given, layout)
    values, _, _ = reader.options(layout, own, statement.subject.span, f"`{layout.name}`")
    found = None if model is None else _rules(statement, layout, values, model, directory)
    if isinstance(found, Diagnostic):
        reader.diagnostics.append(found)
    if found is None or isinstance(found, Diagnostic):
        return None
    lines = _over(found, statement, place or statement.subject.span, reader.diagnostics)
    block = statement.block or Block((), statement.span.after())
    options = replace(statement.options, items=rest) if statement.options is not None and rest else None
    return replace(statement, subject=None, options=options, block=replace(block, rules=lines))


def standard_forms(model: Model, directory: Path) -> Iterator[tuple[LayoutRule, ...]]:
    """Yield the rules of each form of a model's standard layout on `tp`, that with most options first.

    Args:
        model: whose layout is used.
        directory: base of relative config file names.
    """
    found = _layouts(model, directory)
    if isinstance(found, Diagnostic | None):
        return
    known, fields = found
    for sequence, loss_parallel in itertools.product((True, False), repeat=2):
        options = {"sequence": sequence, "loss_parallel": loss_parallel}
        if _problem(known, "tp", options) is None:
            yield tuple(known.on("tp", fields=fields, **options))


def _divided(items: Iterable[Argument], layout: type[Treatment]) -> tuple[tuple[Argument, ...], tuple[Argument, ...]]:
    """The options of the layout, and those of the statement itself."""
    names = {item.name for item in layout.options}
    own: list[Argument] = []
    rest: list[Argument] = []
    for item in items:
        word = item.name.text if item.name is not None else item.value.text if isinstance(item.value, Name) else None
        (own if word in names else rest).append(item)
    return tuple(own), tuple(rest)


def _rules(
    statement: Statement, layout: type[Treatment], values: dict[str, Any], model: Model, directory: Path
) -> str | Diagnostic | None:
    """The text of the layout's rules; None where an option is wrong."""
    assert statement.subject is not None
    found = _layouts(model, directory)
    word = f"`{statement.keyword.text} {layout.name}`"
    if isinstance(found, Diagnostic | None):
        return found or rules.NoStandardLayout.at(
            statement.subject.span, f"no standard layout is known for this model, which {word} needs",
            label="not for this model", help=["write the rules: `{ PATH = TREATMENT }`"],
        )  # fmt: skip
    known, fields = found
    if layout.name == "blocks":
        return f"{known.blocks} = unit\nroot = unit"
    if any(isinstance(value, Hole) for value in values.values()):
        return None
    axes = [axis.text for axis in statement.axes]
    if axes not in (["tp"], ["ep"]):
        return ""  # invalid axes are reported where they are read
    problem = _problem(known, axes[0], values)
    if problem is not None:
        return rules.NoStandardLayout.at(
            statement.subject.span, problem, label="not for this model",
            help=["write the rules: `{ PATH = TREATMENT }`"],
        )  # fmt: skip
    options = {name: bool(values.get(name)) for name in ("sequence", "loss_parallel", "overlap", "across_tp")}
    chosen = known.on(axes[0], fields=fields, **options)
    return "\n".join(f"{rule.path} = {rule.treatment}" for rule in chosen)


def _problem(known: StandardLayouts, axis: str, values: Mapping[str, Any]) -> str | None:
    """Return why the model has no such layout, or no such form of it."""
    problem, reason = None, None
    if not (known.tp if axis == "tp" else known.ep):
        problem, reason = f"the model has no standard layout on `{axis}`", known.reasons.get(axis)
    elif axis == "ep" and values.keys() - {"across_tp"}:
        problem = "the standard layout on `ep` has no option but `across_tp`"
    else:
        lacking = next((name for name, value in values.items() if value and not known.has_form(name)), None)
        if lacking is not None:
            problem = f"the standard layout of this model has no form with `{lacking}`"
            reason = known.reasons.get(lacking if lacking != "overlap" else "sequence")
        elif values.get("overlap") and not values.get("sequence"):
            problem = "`overlap` needs `sequence`, without which nothing is gathered"
        elif axis == "tp" and values.get("across_tp") and not values.get("sequence"):
            problem = "`across_tp` needs `sequence`, without which a mixture takes all tokens"
    return f"{problem}: {reason}" if reason is not None else problem


def _layouts(model: Model, directory: Path) -> tuple[StandardLayouts, Mapping[str, Any]] | Diagnostic | None:
    """The layouts of the model's family, and the fields of its config that are written somewhere."""
    from legoai.specs.models.layouts import BUILT_IN, HUGGING_FACE

    if model.family != "huggingface":
        known = BUILT_IN.get(model.family) if isinstance(model.family, str) else None
        return None if known is None else (known, {**_preset(model), **model.arguments})
    fields: Any = {}
    if isinstance(model.target, str):
        from legoai.specs.models.manifests.cache import read_config
        from legoai.specs.models.manifests.manifest import ManifestError

        try:
            fields = read_config(directory / model.target, name=model.target)
        except ManifestError as error:
            if "model_type" not in model.arguments:
                from legoai.dsl.diagnostics.unavailable import unavailable

                place = model.span_of("target")
                assert place is not None
                return unavailable(error, model, place, directory)
    fields = {**fields, **model.arguments}
    known = HUGGING_FACE.get(fields["model_type"]) if isinstance(fields.get("model_type"), str) else None
    return None if known is None else (known, fields)


def _preset(model: Model) -> Mapping[str, Any]:
    """The fields of a built-in model's preset; none where it has no such preset, which a rule reports."""
    from legoai.specs.models.families import FAMILIES, config_values

    presets = FAMILIES[str(model.family)].presets
    preset = presets.get(model.target) if isinstance(model.target, str) else None
    return {} if preset is None else config_values(preset)


def _over(text: str, statement: Statement, place: Span, diagnostics: list[Diagnostic]) -> tuple[RuleLine, ...]:
    """The layout's rules without those that the statement replaces, then the statement's own."""
    parsed = parse(f"{statement.keyword.text} {{\n{text}\n}}\n", "a standard layout")
    [made] = parsed.file.statements
    assert isinstance(made, Statement)
    assert made.block is not None
    assert not parsed.diagnostics, "layouts are written in the language"
    own = statement.block.rules if statement.block is not None else ()
    replaced = {path for rule in own for path in _alternatives(rule.path.canonical)}
    known = {path for rule in made.block.rules for path in _alternatives(rule.path.canonical)}
    for rule in own:
        if takes_away(rule) and not known.issuperset(_alternatives(rule.path.canonical)):
            diagnostics.append(nothing_to_unset(rule))
    kept = [_at(rule, place) for line in made.block.rules for rule in _without(line, replaced)]
    return (*kept, *(rule for rule in own if not takes_away(rule)))


def _without(rule: RuleLine, paths: Collection[str]) -> Iterator[RuleLine]:
    """The rule for those of its alternatives that are none of the paths."""
    found = _alternatives(rule.path.canonical)
    left = [path for path in found if path not in paths]
    if len(left) == len(found):
        yield rule
    else:
        yield from (replace(rule, path=replace(rule.path, text=path)) for path in left)


def _alternatives(path: str) -> list[str]:
    """The pattern once for each of its alternatives: `a.wq` and `a.wk` for `a.{wq, wk}`."""
    match = _CHOICE.search(path)
    if match is None:
        return [path]
    words = [word.strip() for word in match[1].split(",")]
    return [item for word in words for item in _alternatives(f"{path[: match.start()]}{word}{path[match.end() :]}")]


def _at(node: T, place: Span) -> T:
    """Return the node with ``place`` for all its spans."""
    if isinstance(node, Span):
        return place  # type: ignore[return-value]
    if isinstance(node, tuple):
        return tuple(_at(item, place) for item in node)  # type: ignore[return-value]
    if isinstance(node, Record):
        return type(node)(**{field: _at(getattr(node, field), place) for field in node.fields_})
    return node
