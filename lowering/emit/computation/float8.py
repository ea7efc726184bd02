"""`precision`: the function that converts linear layers to float8, and the scales of all-gathered float8 parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from legoai.dsl.analysis.facts import grouped
from legoai.dsl.analysis.parallelism.float8 import converted_layers, gathered_weights
from legoai.lowering.emit.base import Draft, Lowering, rule_note
from legoai.lowering.emit.blocks import MODEL, BlockGroup
from legoai.lowering.emit.code import Group, Line, Note, Statement, call, literal, quoted
from legoai.lowering.emit.held_modules import blocks_of, where_held
from legoai.specs.directives.precision import Float8

_WHY: Final = "first, since it replaces layers that later functions transform"


@dataclass(frozen=True, slots=True)
class Converted:
    """Conversion of one layer."""

    recipe: str
    gather_weights: bool
    is_shared: bool
    """Whether the layer has several places."""
    note: Note


def emit(lowering: Lowering, draft: Draft) -> None:
    """Add `apply_float8`, before all other functions that change the model."""
    found: dict[str, Converted] = {}
    gathered = gathered_weights(lowering.analysis)
    for rule, paths in grouped(converted_layers(lowering.analysis).items()):
        assert isinstance(rule.treatment, Float8), "see `supports` of the family"
        found |= {
            path: Converted(rule.treatment.recipe, path in gathered, lowering.manifest.is_shared(path), rule_note(rule))
            for path in paths
        }
    if not found:
        return
    draft.imports.name("legoai.runtime", "convert_to_float8")
    if gathered:
        draft.imports.name("legoai.runtime", "compute_float8_scales")
        first = next(converted.note for path, converted in found.items() if path in gathered)
        draft.step.before.append(Line(call("compute_float8_scales", "training.parts"), "", first))
    body = [item for group in lowering.groups(found) for item in _convert(lowering, group)]
    applied = [
        item.value.opening[:-1]
        for item in draft.parallelize
        if isinstance(item, Line) and isinstance(item.value, Group)
    ]
    note = lowering.note(lowering.plan.precision)
    draft.apply("apply_float8", mesh=None, body=body, note=note, why=_WHY, before=applied[0] if applied else "")


def _convert(lowering: Lowering, group: BlockGroup[Converted]) -> list[Statement]:
    """Return the calls for a group: one for each rule, and one for each layer outside all blocks."""
    blocks = blocks_of(lowering, group)
    if group.blocks is None:
        return [
            item
            for path, converted in group.members
            for item in where_held(lowering, group, path, _line(MODEL, (path,), converted))
        ]
    together: dict[Converted, list[str]] = {}
    for relative, converted in group.members:
        together.setdefault(converted, []).append(relative)
    return blocks.loop([_line(blocks.block, tuple(paths), converted) for converted, paths in together.items()])


def _line(module: str, paths: tuple[str, ...], converted: Converted) -> Line:
    made = call(
        "convert_to_float8",
        module,
        literal(paths),
        recipe=quoted(converted.recipe),
        gather_weights="True" if converted.gather_weights else None,
        everywhere_in=MODEL if converted.is_shared else None,
    )
    return Line(made, "", converted.note)
