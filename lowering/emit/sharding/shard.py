"""`shard`: placement of modules and parameters on the `tp` axis, and of experts on `ep`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Final

from legoai.dsl.analysis.parallelism.overlap import overlapped
from legoai.dsl.analysis.parallelism.shard import (
    inputs_of,
    outputs_of,
    placed_modules,
    placement,
    shard_on_tp,
    tensor_parallel,
)
from legoai.dsl.analysis.stages.pipeline import is_staged
from legoai.dsl.analysis.training.loss import layer_of_loss
from legoai.lowering.emit.base import Draft, Lowering, rule_note
from legoai.lowering.emit.blocks import BlockGroup, expression
from legoai.lowering.emit.code import Group, Item, Line, Note, Statement, call, dictionary
from legoai.lowering.emit.held_modules import blocks_of, where_held
from legoai.lowering.emit.sharding import experts
from legoai.lowering.emit.sharding.styles import placed as placed_style
from legoai.lowering.emit.sharding.styles import style
from legoai.lowering.emit.step import PARAMETERS
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.shard import Shard

_WHY: Final = "on unsharded parameters under the model's own paths, before modules are wrapped"
_STYLES_MODULE = "torch.distributed.tensor.parallel"


def emit(lowering: Lowering, draft: Draft) -> None:
    """Add the functions that place parameters on `tp`, and experts on `ep`."""
    shard = shard_on_tp(lowering.analysis)
    if shard is not None:
        _emit_tensor_parallel(lowering, draft, shard)
    experts.emit(lowering, draft)


def _emit_tensor_parallel(lowering: Lowering, draft: Draft, shard: Shard) -> None:
    """Add `apply_tensor_parallel`, with the plan's styles by module and its placements by parameter."""
    laid = tensor_parallel(lowering.analysis)
    assert len(laid.styles) + len(laid.placements) == len(lowering.assignment(shard)), "a rule of the wrong sort"
    emitted = _styles(lowering, draft, laid.styles)
    placed = {
        path: (placed_style(rules, draft), rule_note(next(iter(rules.values()))))
        for path, rules in placed_modules(lowering.analysis).items()
    }
    body: list[Statement] = []
    for styles in (emitted, placed):  # conversions of a module's outputs come after the placement of its parameters
        for group in reversed(lowering.groups(styles)):
            body += _parallelize(lowering, group, lowering.note(shard))
    if emitted or placed:
        draft.imports.name(_STYLES_MODULE, "parallelize_module")
    body += _retie(lowering, shard)
    if body:
        draft.apply("apply_tensor_parallel", mesh='mesh["tp"]', body=body, note=lowering.note(shard), why=_WHY)
        draft.imports.name("legoai.runtime", "reduce_partial_gradients")
        draft.step.after_backward.append(Line(call("reduce_partial_gradients", PARAMETERS), "", lowering.note(shard)))


def _styles(lowering: Lowering, draft: Draft, rules: Mapping[str, PathRule[Any]]) -> dict[str, tuple[Group, Note]]:
    """Return the styles of modules, each with its rule's line: one for all modules that a rule treats equally."""
    made: dict[Hashable, tuple[Group, Note]] = {}
    found = {}
    for path, rule in rules.items():
        info = lowering.manifest.modules[path]
        inside = tuple(layer.removeprefix(path) for layer in overlapped(lowering.analysis).get(path, ()))
        of_loss = path == layer_of_loss(lowering.analysis)
        alike = id(rule), info.kind, len(info.inputs), inputs_of(info), outputs_of(info), inside, of_loss
        if alike not in made:
            made[alike] = style(lowering, path, rule, draft), rule_note(rule)
        found[path] = made[alike]
    return found


def _parallelize(lowering: Lowering, group: BlockGroup[Any], note: Note) -> list[Statement]:
    blocks = blocks_of(lowering, group)
    own = [(value, line) for relative, (value, line) in group.members if not relative]
    parts = sorted(
        ((relative, value, line) for relative, (value, line) in group.members if relative),
        key=lambda part: _order(lowering, f"{blocks.base}.{part[0]}" if blocks.base else part[0]),
    )
    body: list[Statement] = [
        Line(call("parallelize_module", blocks.block, "mesh", value), "", line) for value, line in own
    ]
    if is_staged(lowering.analysis) and group.blocks is None:
        for path, value, line in parts:
            styled = Item(value, note=line)
            made = call("parallelize_module", expression(lowering.manifest, path), "mesh", styled)
            body += where_held(lowering, group, path, Line(made, "", note))
    elif parts:
        body.append(Line(call("parallelize_module", blocks.block, "mesh", dictionary(parts)), "", note))
    return blocks.loop(body)


def _order(lowering: Lowering, path: str) -> tuple[int, ...]:
    """Return the module's index in the model, to print styles in the model's order."""
    order: list[int] = []
    while path:
        order.append(lowering.manifest.modules[path].position)
        path = path.rpartition(".")[0]
    return tuple(reversed(order))


def _retie(lowering: Lowering, shard: Shard) -> list[Statement]:
    """Tie parameters again that were one: distributing a module creates new parameters."""
    body: list[Statement] = []
    for first, *others in lowering.manifest.tied_parameters:
        if placement(lowering.analysis, first).is_plain:
            continue
        body += [
            Line(_parameter(lowering, first), f"{_parameter(lowering, other)} = ", lowering.note(shard))
            for other in others
        ]
    return body


def _parameter(lowering: Lowering, path: str) -> str:
    module, _, name = path.rpartition(".")
    return f"{expression(lowering.manifest, module)}.{name}"
