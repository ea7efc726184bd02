"""`shard`: placement of modules and parameters on the `tp` axis, and of experts on `ep`."""

from __future__ import annotations

from typing import Any

from legoai.dsl.analysis.pipeline import is_staged
from legoai.dsl.analysis.shard import placement, shard_on_tp, tensor_parallel
from legoai.lowering.emit import experts
from legoai.lowering.emit.base import Draft, Lowering, rule_note
from legoai.lowering.emit.blocks import BlockGroup, expression
from legoai.lowering.emit.code import Function, Item, Line, Note, Statement, call, dictionary, quoted
from legoai.lowering.emit.stages import blocks_of, where_held
from legoai.lowering.emit.step import PARAMETERS
from legoai.lowering.emit.styles import layout, style
from legoai.specs.directives.shard import Shard

_STYLES_MODULE = "torch.distributed.tensor.parallel"


def emit(lowering: Lowering, draft: Draft) -> None:
    """Add what places parameters on `tp`, and experts on `ep`."""
    shard = shard_on_tp(lowering.analysis)
    if shard is not None:
        _emit_tensor_parallel(lowering, draft, shard)
    experts.emit(lowering, draft)


def _emit_tensor_parallel(lowering: Lowering, draft: Draft, shard: Shard) -> None:
    """Add `apply_tensor_parallel`, with the plan's styles by module and its placements by parameter."""
    laid = tensor_parallel(lowering.analysis)
    assert len(laid.styles) + len(laid.placements) == len(lowering.assignment(shard)), "a rule of the wrong sort"
    emitted = {path: (style(lowering, path, rule, draft), rule_note(rule)) for path, rule in laid.styles.items()}
    body: list[Statement] = []
    for group in reversed(lowering.groups(emitted)):
        body += _parallelize(lowering, group, lowering.note(shard))
    if emitted:
        draft.imports.name(_STYLES_MODULE, "parallelize_module")
    placed = {path: (layout(rule.treatment, draft), rule_note(rule)) for path, rule in laid.placements.items()}
    for parameters in lowering.groups(placed):
        body += _distribute(lowering, parameters)
    if placed:
        _add_distribute_parameter(draft)
    body += _retie(lowering, shard)
    if body:
        draft.apply("apply_tensor_parallel", mesh='mesh["tp"]', body=body, note=lowering.note(shard))
        draft.imports.name("legoai.runtime", "reduce_partial_gradients")
        draft.step.after_backward.append(Line(call("reduce_partial_gradients", PARAMETERS), "", lowering.note(shard)))


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
    """The module's place in the model, to print styles in the order in which the model is written."""
    order: list[int] = []
    while path:
        order.append(lowering.manifest.modules[path].position)
        path = path.rpartition(".")[0]
    return tuple(reversed(order))


def _distribute(lowering: Lowering, group: BlockGroup[Any]) -> list[Statement]:
    blocks = blocks_of(lowering, group)
    body: list[Statement] = []
    for relative, (placed, note) in group.members:
        above, _, name = relative.rpartition(".")
        path = f"{blocks.base}.{above}" if blocks.base and above else blocks.base or above
        module = expression(lowering.manifest, path, base=blocks.base, block=blocks.block)
        made = call("distribute_parameter", module, quoted(name), "mesh", placed)
        body += where_held(lowering, group, path, Line(made, "", note))
    return blocks.loop(body)


def _add_distribute_parameter(draft: Draft) -> None:
    draft.imports.name("torch.distributed.tensor", "Placement")
    draft.imports.name("torch.distributed.tensor", "distribute_tensor")
    draft.functions.append(
        Function(
            "distribute_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None",
            (
                Line("module.get_parameter(name)", "parameter = "),
                Line("distribute_tensor(parameter, mesh, (placement,))", "placed = "),
                Line("nn.Parameter(placed, requires_grad=parameter.requires_grad)", "placed = "),
                Line("module.register_parameter(name, placed)"),
            ),
        )
    )


def _retie(lowering: Lowering, shard: Shard) -> list[Statement]:
    """Tie what was one parameter again: distributing a module gives it parameters of its own."""
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
