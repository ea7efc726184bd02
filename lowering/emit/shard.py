"""`shard`: how do modules and parameters lie on the `tp` axis, and experts on `ep`?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from legoai.lowering.emit import experts
from legoai.lowering.emit.base import Draft, Lowering, rule_note, rule_span
from legoai.lowering.emit.blocks import Group, expression
from legoai.lowering.emit.code import Function, Item, Line, Note, Statement, call, dictionary, quoted
from legoai.lowering.emit.stages import blocks_of, is_staged, where_held
from legoai.lowering.emit.styles import LAYOUT_TREATMENTS, STYLES, layout, placement_of_parameter, style
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.layouts import Replicated, Sharded
from legoai.specs.directives.shard import Colwise, Rowwise, Shard

_STYLES_MODULE = "torch.distributed.tensor.parallel"


def emit(lowering: Lowering, draft: Draft) -> None:
    """Add what places parameters on `tp`, and experts on `ep`."""
    for statement in lowering.plan.shard:
        if len(statement.axes) > 1:
            lowering.refuse(
                lowering.place(statement, "axes"),
                f"`shard on {', '.join(statement.axes)}` is not lowered",
                help=["write a statement for each axis"],
            )
    shard = tensor_parallel(lowering)
    if shard is not None:
        _emit_tensor_parallel(lowering, draft, shard)
    experts.emit(lowering, draft)


def _emit_tensor_parallel(lowering: Lowering, draft: Draft, shard: Shard) -> None:
    """Add `apply_tensor_parallel`, with the plan's styles by module and its placements by parameter."""
    styles, placements = _split(lowering, shard)
    _check_logits(lowering, styles)
    emitted = {path: (style(lowering, path, rule, draft), rule_note(rule)) for path, rule in styles.items()}
    body: list[Statement] = []
    for group in reversed(lowering.groups(emitted)):
        body += _parallelize(lowering, group, lowering.note(shard))
    if emitted:
        draft.imports.name(_STYLES_MODULE, "parallelize_module")
    placed = {path: (layout(rule.treatment, draft), rule_note(rule)) for path, rule in placements.items()}
    for parameters in lowering.groups(placed):
        body += _distribute(lowering, parameters)
    if placed:
        _add_distribute_parameter(draft)
    body += _retie(lowering, shard, styles, placements)
    if body:
        draft.apply("apply_tensor_parallel", mesh='mesh["tp"]', body=body, note=lowering.note(shard))


def tensor_parallel(lowering: Lowering) -> Shard | None:
    """The statement on `tp`; None where the axis has one rank, on which every placement is the whole tensor."""
    return lowering.plan.shard_on("tp") if lowering.plan.mesh.tp > 1 else None


def parallel_loss(lowering: Lowering) -> Note | None:
    """The line of the layer whose logits stay sharded, if there is one."""
    shard = tensor_parallel(lowering)
    if shard is not None:
        for rule in lowering.assignment(shard).values():
            if isinstance(rule.treatment, Colwise) and rule.treatment.loss_parallel:
                return rule_note(rule)
    return None


def _split(lowering: Lowering, shard: Shard) -> tuple[dict[str, PathRule[Any]], dict[str, PathRule[Any]]]:
    """The rules by module path and those by parameter path; a rule of the wrong sort is refused."""
    styles: dict[str, PathRule[Any]] = {}
    placements: dict[str, PathRule[Any]] = {}
    modules = lowering.manifest.modules
    assignment = lowering.assignment(shard)
    for path, rule in assignment.items():
        treatment = rule.treatment
        if path in modules and isinstance(treatment, STYLES):
            styles[path] = rule
        elif path not in modules and isinstance(treatment, LAYOUT_TREATMENTS):
            placements[path] = rule
        elif path in modules:
            what = "`experts` is a style for `ep`" if treatment.name == "experts" else "a placement is for a parameter"
            lowering.refuse(rule_span(rule), f"`{path or 'root'}` is a module, and {what}", label="a style is needed")
        else:
            lowering.refuse(rule_span(rule), f"`{path}` is a parameter, and `{treatment.name}` is a style of modules")
    for path, rule in placements.items():
        owner = styles.get(path.rpartition(".")[0])
        if owner is not None and owner.treatment.name in ("colwise", "rowwise", "sequence"):
            lowering.refuse(
                rule_span(rule),
                f"`{owner.treatment.name}` already places `{path}`, as it does all parameters of its module",
                label="a second placement",
            )
    return styles, placements


def _parallelize(lowering: Lowering, group: Group[Any], note: Note) -> list[Statement]:
    blocks = blocks_of(lowering, group)
    own = [(value, line) for relative, (value, line) in group.members if not relative]
    parts = sorted(
        ((relative, value, line) for relative, (value, line) in group.members if relative),
        key=lambda part: _order(lowering, f"{blocks.base}.{part[0]}" if blocks.base else part[0]),
    )
    body: list[Statement] = [
        Line(call("parallelize_module", blocks.block, "mesh", value), "", line) for value, line in own
    ]
    if is_staged(lowering) and group.blocks is None:
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


def _distribute(lowering: Lowering, group: Group[Any]) -> list[Statement]:
    blocks = blocks_of(lowering, group)
    body: list[Statement] = []
    for relative, (placement, note) in group.members:
        above, _, name = relative.rpartition(".")
        path = f"{blocks.base}.{above}" if blocks.base and above else blocks.base or above
        module = expression(lowering.manifest, path, base=blocks.base, block=blocks.block)
        made = call("distribute_parameter", module, quoted(name), "mesh", placement)
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


def _retie(
    lowering: Lowering, shard: Shard, styles: Mapping[str, PathRule[Any]], placements: Mapping[str, PathRule[Any]]
) -> list[Statement]:
    """Tie what was one parameter again: distributing a module gives it parameters of its own."""
    body: list[Statement] = []
    for tied in lowering.manifest.tied_parameters:
        laid = {path: placement_of_parameter(lowering, path, styles, placements) for path in tied}
        if set(laid.values()) == {None}:
            continue
        if len(set(laid.values())) > 1:
            ways = ", ".join(f"`{path}` {way or 'whole on every rank'}" for path, way in laid.items())
            lowering.refuse(
                lowering.place(shard),
                f"one parameter has different placements in different modules: {ways}",
                label="these modules share a parameter",
                help=["`rowwise` for an embedding and `colwise` for a linear layer place it alike"],
            )
            continue
        first, *others = tied
        body += [
            Line(_parameter(lowering, first), f"{_parameter(lowering, other)} = ", lowering.note(shard))
            for other in others
        ]
    return body


def _parameter(lowering: Lowering, path: str) -> str:
    module, _, name = path.rpartition(".")
    return f"{expression(lowering.manifest, module)}.{name}"


def _check_logits(lowering: Lowering, styles: Mapping[str, PathRule[Any]]) -> None:
    """The loss takes whole logits, or sharded ones under `loss_parallel`; anything else would be silently wrong."""
    root = lowering.manifest.modules[""]
    last = {root.flow[step].name for step in root.outputs if root.flow[step].op == "call"}
    for path, rule in styles.items():
        treatment = rule.treatment
        parallel = isinstance(treatment, Colwise) and treatment.loss_parallel
        if parallel and root.flow and path not in last:
            lowering.refuse(
                rule_span(rule),
                f"`loss_parallel` is for the layer whose output the model returns, and `{path}` is another",
                label="not the last layer",
            )
        if path not in last or not isinstance(treatment, Colwise | Rowwise):
            continue
        default = Sharded(dim=-1) if isinstance(treatment, Colwise) else Replicated()
        output = treatment.output or default
        vocabulary = isinstance(output, Sharded) and output.dim in (-1, 2)
        if parallel and not vocabulary:
            lowering.refuse(
                rule_span(rule),
                f"`loss_parallel` wants the logits of `{path}` sharded on the vocabulary",
                label="another output layout",
                help=["leave `output` out, or write `output = shard(-1)`"],
            )
        elif not parallel and not isinstance(output, Replicated):
            lowering.refuse(
                rule_span(rule),
                f"the model returns the output of `{path}`, of which every rank of `tp` would hold a part",
                label="the loss needs whole logits",
                help=["add `loss_parallel = true`, or `output = replicate`"],
            )
