"""`shard on ep`: which ranks hold which experts, and how are their parameters sharded?"""

from __future__ import annotations

from typing import Any

from legoai.dsl.analysis.mesh import replicating_axes, shard_ranks, sharded_axes
from legoai.lowering.emit.base import Draft, Lowering, rule_note, rule_span
from legoai.lowering.emit.blocks import expression
from legoai.lowering.emit.code import Line, Note, Statement, call, literal
from legoai.lowering.emit.mesh import sharding_mesh
from legoai.lowering.emit.stages import blocks_of, where_held
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.compile import AotEager, Inductor
from legoai.specs.directives.shard import Experts, Shard


def emit(lowering: Lowering, draft: Draft) -> None:
    """Add `apply_expert_parallel`; on one rank, `apply_expert_capacity` where experts have one."""
    shard, ranks = lowering.plan.shard_on("ep"), lowering.plan.mesh.ep
    if shard is None:
        if ranks > 1:
            lowering.refuse(
                lowering.place(lowering.plan.mesh, "ep"),
                f"no statement says which experts the {ranks} ranks of `ep` hold",
                label="no experts on these ranks",
                help=["add `shard on ep { … = experts }`"],
            )
        return
    found = _experts(lowering, shard)
    if ranks == 1:
        found = {path: rule for path, rule in found.items() if rule.treatment.capacity_factor is not None}
    if not found or (ranks > 1 and not _has_ranks(lowering, shard)):
        return
    emitted = {path: (rule.treatment.capacity_factor, rule_note(rule)) for path, rule in found.items()}
    _refuse_whole_graphs(lowering, found)
    if ranks == 1:
        draft.imports.name("legoai.runtime.experts", "limit_capacity")
        body = _calls(lowering, emitted)
        draft.apply("apply_expert_capacity", mesh=None, body=body, note=lowering.note(shard))
        return
    draft.imports.name("torch.distributed.tensor.parallel", "parallelize_module")
    draft.imports.name("legoai.runtime.experts", "ExpertParallel")
    draft.imports.name("legoai.runtime.mesh", "split_off_experts")
    mesh = call("split_off_experts", sharding_mesh(lowering, draft), ep=literal(ranks)).inline()
    draft.apply(
        "apply_expert_parallel", mesh=f'{mesh}["ep"]', body=_calls(lowering, emitted), note=lowering.note(shard)
    )


def distributed_experts(lowering: Lowering) -> dict[str, Note]:
    """The modules whose experts lie on different ranks, each with the line of its rule."""
    shard = lowering.plan.shard_on("ep")
    if shard is None or lowering.plan.mesh.ep == 1:
        return {}
    modules = lowering.manifest.modules
    return {path: rule_note(rule) for path, rule in lowering.assignment(shard).items() if path in modules}


def axes_of_experts(lowering: Lowering) -> tuple[str, ...]:
    """The axes over which `fsdp` replicates and shards experts, by their names in the mesh of `split_off_experts`."""
    names = ["_".join(axes) for axes in (replicating_axes(lowering.analysis), sharded_axes(lowering.analysis)) if axes]
    return (*names[:-1], f"{names[-1]}_mod_ep")


def ranks_of_one_expert(lowering: Lowering) -> int:
    """The ranks over which `fsdp` shards the same experts: those that it shards over, in groups of `ep`."""
    mesh = lowering.plan.mesh
    return shard_ranks(lowering.analysis) // mesh.ep


def sharded_dim(lowering: Lowering, path: str) -> int | None:
    """The dim on which `fsdp` cuts the experts of a rank: 0, or 1 where they are too few; None where neither fits."""
    ranks, groups = ranks_of_one_expert(lowering), lowering.plan.mesh.ep
    shapes = [parameter.shape for parameter in lowering.manifest.modules[path].parameters]
    if all(shape[0] % (groups * ranks) == 0 for shape in shapes):
        return 0
    return 1 if all(len(shape) > 1 and shape[1] % ranks == 0 for shape in shapes) else None


def _calls(lowering: Lowering, emitted: dict[str, tuple[float | None, Note]]) -> list[Statement]:
    body: list[Statement] = []
    for group in lowering.groups(emitted):
        blocks = blocks_of(lowering, group)
        calls: list[Statement] = []
        for relative, (capacity, note) in group.members:
            path = f"{blocks.base}.{relative}" if blocks.base and relative else blocks.base or relative
            module = expression(lowering.manifest, path, base=blocks.base, block=blocks.block)
            factor = None if capacity is None else literal(capacity)
            if lowering.plan.mesh.ep == 1:
                made = call("limit_capacity", module, capacity_factor=factor)
            else:
                made = call("parallelize_module", module, "mesh", call("ExpertParallel", capacity_factor=factor))
            calls += where_held(lowering, group, path, Line(made, "", note))
        body += blocks.loop(calls)
    return body


def _experts(lowering: Lowering, shard: Shard) -> dict[str, PathRule[Any]]:
    """The modules of experts with their rules; what is none is refused."""
    found, wrong, ranks = {}, set(), lowering.plan.mesh.ep
    for path, rule in lowering.assignment(shard).items():
        if id(rule) in wrong:
            continue
        info = lowering.manifest.modules.get(path)
        if info is None or info.kind != "experts" or not isinstance(rule.treatment, Experts):
            lowering.refuse(
                rule_span(rule),
                f"`{path or 'root'}` is no module of experts, which takes rows sorted by expert and their numbers"
                if isinstance(rule.treatment, Experts)
                else f"`{rule.treatment.name}` is not for `ep`, which takes `experts`",
                label="not lowered on `ep`",
            )
            wrong.add(id(rule))
            continue
        count = info.attributes.get("n_experts")
        if not isinstance(count, int) or count % ranks or any(item.shape[:1] != (count,) for item in info.parameters):
            lowering.refuse(
                rule_span(rule),
                f"the {ranks} ranks of `ep` cannot share the experts of `{path}`: its parameters need a slice on dim 0 "
                f"for each expert, and {ranks} must divide their number",
            )
            wrong.add(id(rule))
            continue
        found[path] = rule
    _refuse_twice(lowering, found)
    if ranks > 1 and lowering.plan.fsdp is not None and _has_ranks(lowering, shard):
        for path, rule in found.items():
            if sharded_dim(lowering, path) is None:
                holders = ranks_of_one_expert(lowering)
                lowering.refuse(
                    rule_span(rule),
                    f"`fsdp` cannot cut the experts of `{path}` evenly over the {holders} ranks that hold the same "
                    "ones, neither by experts nor on dim 1",
                    help=["choose a larger `ep`"],
                )
    return found


def _refuse_twice(lowering: Lowering, found: dict[str, PathRule[Any]]) -> None:
    """Refuse parameters of experts that `tp` places too."""
    shard = lowering.plan.shard_on("tp")
    if shard is None or lowering.plan.mesh.tp == 1 or lowering.plan.mesh.ep == 1:
        return
    for path, rule in lowering.assignment(shard).items():
        above = path.rpartition(".")[0]
        if (path in found and path not in ("",)) or above in found:
            lowering.refuse(
                rule_span(rule),
                f"`{path}` lies on `ep` already, and experts on both `ep` and `tp` are not lowered",
                help=["leave the experts whole on the ranks of `tp`"],
            )


def _refuse_whole_graphs(lowering: Lowering, found: dict[str, PathRule[Any]]) -> None:
    """Refuse one graph of what waits for the numbers of tokens that arrive, or that are kept."""
    directive = lowering.plan.compile
    for path, rule in () if directive is None else lowering.assignment(directive).items():
        inside = next((item for item in found if not path or item == path or item.startswith(f"{path}.")), None)
        if inside is not None and isinstance(rule.treatment, Inductor | AotEager) and rule.treatment.fullgraph:
            lowering.refuse(
                lowering.place(rule.treatment, "fullgraph")
                if rule.treatment.origin("fullgraph").span
                else rule_span(rule),
                f"`{path or 'root'}` cannot be one graph: how many tokens `{inside}` takes differs from call to call",
                label="one graph",
                help=["write `fullgraph = false`"],
            )
            return


def _has_ranks(lowering: Lowering, shard: Shard) -> bool:
    """Whether `fsdp` shards over ranks that `ep` can group; if not, the plan is refused."""
    if lowering.plan.fsdp is None:
        lowering.refuse(
            lowering.place(shard),
            "`ep` groups ranks of `dp_shard` and `cp`, over which no statement shards",
            help=["add `fsdp on dp_shard`"],
        )
        return False
    total = shard_ranks(lowering.analysis)
    if total % lowering.plan.mesh.ep:
        lowering.refuse(
            lowering.place(lowering.plan.mesh, "ep"),
            f"`ep` = {lowering.plan.mesh.ep} does not divide the {total} ranks over which `fsdp` shards",
        )
        return False
    return True
