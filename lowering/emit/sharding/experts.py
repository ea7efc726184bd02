"""`shard on ep`: experts on different ranks, and their capacity."""

from __future__ import annotations

from typing import Final

from legoai.dsl.analysis.parallelism.experts import (
    axes_of_experts,
    crosses_tp,
    distributed_experts,
    groups_of_experts,
    is_routed,
    limited_experts,
)
from legoai.lowering.emit.base import Draft, Lowering, rule_note
from legoai.lowering.emit.blocks import expression
from legoai.lowering.emit.code import Line, Node, Note, Statement, call, literal
from legoai.lowering.emit.devices.mesh import joined
from legoai.lowering.emit.held_modules import blocks_of, where_held

EXPERT_MESH: Final = "expert_mesh"
"""Name of the experts' mesh in the program."""

_WHY: Final = "like tensor parallelism, before modules are wrapped"
_WHY_CAPACITY: Final = "before modules are wrapped"


def emit(lowering: Lowering, draft: Draft) -> None:
    """Add `apply_expert_parallel`; on one rank, `apply_expert_capacity` where experts have a capacity."""
    shard, ranks = lowering.plan.shard_on("ep"), lowering.plan.mesh.ep
    if shard is None:
        return
    found = distributed_experts(lowering.analysis) if ranks > 1 else limited_experts(lowering.analysis)
    if not found:
        return
    modules = lowering.manifest.modules
    emitted = {
        path: (rule.treatment.capacity_factor, is_routed(modules[path]), rule_note(rule))
        for path, rule in found.items()
    }
    if ranks == 1:
        draft.imports.name("legoai.runtime.parallelism.experts", "limit_capacity")
        if any(routed for _, routed, _ in emitted.values()):
            for name in ("give_rows", "take_routed_tokens"):
                draft.imports.name("legoai.runtime.parallelism.experts", name)
        body = _calls(lowering, emitted)
        draft.apply("apply_expert_capacity", mesh=None, body=body, note=lowering.note(shard), why=_WHY_CAPACITY)
        return
    draft.imports.name("torch.distributed.tensor.parallel", "parallelize_module")
    draft.imports.name("legoai.runtime.parallelism.experts", "ExpertParallel")
    draft.imports.name("legoai.runtime.parallelism.mesh", "split_off_experts")
    around = joined(draft, *groups_of_experts(lowering.analysis))
    split = call("split_off_experts", around, ep=literal(ranks)).inline()
    assert split is not None, "a mesh fits on one line"
    draft.parallelize.append(Line(split, f"{EXPERT_MESH} = ", lowering.note(lowering.plan.mesh, "ep")))
    mesh, body = f'{EXPERT_MESH}["ep"]', _calls(lowering, emitted)
    draft.apply("apply_expert_parallel", mesh=mesh, body=body, note=lowering.note(shard), why=_WHY)


def mesh_of_units(lowering: Lowering, draft: Draft) -> Node:
    """Return the mesh of `fsdp` for experts: the ranks that replicate them, if any, and those that hold the same."""
    analysis = lowering.analysis
    order = tuple(axis for group in groups_of_experts(analysis) for axis in group)
    return joined(draft, *((name,) for name in axes_of_experts(analysis)), mesh=EXPERT_MESH, order=order)


def _calls(lowering: Lowering, emitted: dict[str, tuple[float | None, bool, Note]]) -> list[Statement]:
    body: list[Statement] = []
    for group in lowering.groups(emitted):
        blocks = blocks_of(lowering, group)
        calls: list[Statement] = []
        for relative, (capacity, routed, note) in group.members:
            path = blocks.path(relative)
            module = expression(lowering.manifest, path, base=blocks.base, block=blocks.block)
            factor = None if capacity is None else literal(capacity)
            if lowering.plan.mesh.ep == 1:
                made = [call("limit_capacity", module, capacity_factor=factor)]
                if routed:
                    made = [call("give_rows", module), *made, call("take_routed_tokens", module)]
            else:
                pieces = literal(lowering.plan.mesh.tp) if crosses_tp(lowering.analysis) else None
                style = call("ExpertParallel", pieces=pieces, routed="True" if routed else None, capacity_factor=factor)
                made = [call("parallelize_module", module, "mesh", style)]
            for item in made:
                calls += where_held(lowering, group, path, Line(item, "", note))
        body += blocks.loop(calls)
    return body
