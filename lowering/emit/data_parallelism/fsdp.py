"""`fsdp`: the function that makes units of fully sharded data parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Final

from legoai.dsl.analysis.communication.comm import unit_buckets
from legoai.dsl.analysis.parallelism.buckets import ModuleBucket
from legoai.dsl.analysis.parallelism.experts import distributed_experts, sharded_dim
from legoai.dsl.analysis.parallelism.fsdp import FsdpUnit, fsdp_units
from legoai.dsl.analysis.parallelism.graph import is_traced, keeps_between_micro_batches
from legoai.dsl.analysis.stages.pipeline import is_staged
from legoai.lowering.emit.base import Draft, Lowering, rule_note
from legoai.lowering.emit.blocks import BlockGroup, expression
from legoai.lowering.emit.code import Line, Node, Note, Statement, call
from legoai.lowering.emit.computation.precision import policy
from legoai.lowering.emit.data_parallelism import comm, graph
from legoai.lowering.emit.data_parallelism.buckets import statements
from legoai.lowering.emit.devices.mesh import sharding_mesh
from legoai.lowering.emit.devices.offload import policy_of_units
from legoai.lowering.emit.held_modules import blocks_of, where_held
from legoai.lowering.emit.sharding.experts import EXPERT_MESH, mesh_of_units
from legoai.specs.directives.fsdp import Fsdp

_WHY: Final = "after all wrappers, so that the hooks that gather parameters enclose them"


@dataclass(frozen=True, slots=True)
class Sharded:
    """Arguments of one unit."""

    reshard: str
    """The value of `reshard_after_forward`."""
    note: Note
    offloads: bool = False
    """Whether the shards are in host memory."""
    kept: bool = False
    """Whether parameters stay unsharded after backward, until the optimizer changes them."""
    mesh: str = "mesh"
    """The name of the mesh over which the unit is sharded."""
    dim: int = 0
    """The dim along which parameters are sharded."""
    traced: bool = False
    """Whether its all-gathers are nodes of a graph rather than hooks."""


def emit(lowering: Lowering, draft: Draft) -> None:
    """Add `apply_fsdp`, which makes the units, children before parents and the model last."""
    fsdp = lowering.plan.fsdp
    if fsdp is None:
        return
    traced = is_traced(lowering.analysis)
    draft.imports.name(
        *(("legoai.lowering.graph", "shard_unit") if traced else ("torch.distributed.fsdp", "fully_shard"))
    )
    found = _units(lowering, fsdp)
    body: list[Statement] = [Line(policy(lowering, draft), "policy = ", lowering.note(lowering.plan.precision))]
    found |= _units_of_experts(lowering, draft, found)
    found = {path: found[path] for path in lowering.manifest.modules if path in found}
    offload = policy_of_units(lowering, draft)
    if offload is not None:
        body.append(offload)
        found = {path: replace(unit, offloads=True) for path, unit in found.items()}
    found = {path: replace(unit, traced=traced) for path, unit in found.items()}
    body += _in_order(lowering, found, unit_buckets(lowering.analysis))
    meshes: dict[str, Node] = {}
    if any(unit.mesh == EXPERT_MESH for unit in found.values()):
        meshes[EXPERT_MESH] = mesh_of_units(lowering, draft)
    mesh, note = sharding_mesh(lowering, draft), lowering.note(fsdp)
    draft.apply("apply_fsdp", mesh=mesh, meshes=meshes, body=body, note=note, why=_WHY)
    kept = next((unit for unit in found.values() if unit.kept), None)
    if traced and keeps_between_micro_batches(lowering.analysis):
        note_of_kept = graph.note_of_kept(lowering)
        draft.step.before_update.append(Line(call("training.step_graph.reshard"), "", note_of_kept))
    elif kept is not None:
        draft.imports.name("legoai.runtime", "reshard_units")
        draft.step.before_update.append(Line(call("reshard_units", "training.model"), "", kept.note))
    if traced:
        graph.emit(lowering, draft)
    else:
        comm.prefetch(lowering, draft)


def _units(lowering: Lowering, fsdp: Fsdp) -> dict[str, Sharded]:
    """Return the arguments of each unit; the model itself is always a unit, which holds the remaining parameters."""
    freed = is_traced(lowering.analysis) and is_staged(lowering.analysis)  # after each pass
    return {
        path: Sharded(
            _reshard(unit),
            lowering.note(fsdp) if unit.rule is None else rule_note(unit.rule),
            kept=unit.reshard == "never" and not freed,
        )
        for path, unit in fsdp_units(lowering.analysis).items()
    }


def _units_of_experts(lowering: Lowering, draft: Draft, found: dict[str, Sharded]) -> dict[str, Sharded]:
    """Return units for the experts that `ep` distributes, over the ranks that hold the same experts.

    Where no rule makes a unit of experts, they reshard like the enclosing unit.
    """
    experts = distributed_experts(lowering.analysis)
    made = {}
    for path, rule in experts.items():
        dim = sharded_dim(lowering.analysis, path)
        assert dim is not None, f"the experts of {path} cannot be cut"
        made[path] = replace(found[_unit_of(path, found)], note=rule_note(rule), mesh=EXPERT_MESH, dim=dim)
        if dim:
            draft.imports.name("torch.distributed.tensor", "Shard")
    return made


def _reshard(unit: FsdpUnit) -> str:
    """Return `reshard_after_forward`: true is ZeRO-3, false ZeRO-2, a number the ranks that share after forward."""
    return str(unit.reshard) if isinstance(unit.reshard, int) else str(unit.is_resharded_after_forward)


def _unit_of(path: str, found: dict[str, Sharded]) -> str:
    """Return the innermost unit that holds the parameter at ``path``."""
    while path not in found:
        path = path.rpartition(".")[0]
    return path


def _in_order(lowering: Lowering, found: dict[str, Sharded], joined: Sequence[ModuleBucket]) -> list[Statement]:
    """Return the calls for all units, inner ones first: single ones in loops over blocks, joined ones by name."""
    together = {path for bucket in joined for path in bucket.paths}
    alone = {path: unit for path, unit in found.items() if path not in together}
    inner = [bucket for bucket in joined if _unit_of(bucket.paths[0].rpartition(".")[0], alone)]
    outer = [bucket for bucket in joined if bucket not in inner]
    root = alone.pop("")
    body = _join(lowering, found, inner)
    for group in lowering.groups(alone):
        body += _shard(lowering, group)
    body += _join(lowering, found, outer)
    return [*body, *_calls("model", root)]


def _join(lowering: Lowering, found: dict[str, Sharded], joined: Sequence[ModuleBucket]) -> list[Statement]:
    body: list[Statement] = []
    for unit, alike in groupby(joined, key=lambda bucket: found[bucket.paths[0]]):
        several = list(alike)
        body += statements(lowering, several, partial(_call, unit=unit))
        if unit.kept and not unit.traced:
            firsts = (expression(lowering.manifest, bucket.paths[0]) for bucket in several)
            body += [_keep(first, unit) for first in firsts]
    return body


def _shard(lowering: Lowering, group: BlockGroup[Sharded]) -> list[Statement]:
    blocks = blocks_of(lowering, group)
    body: list[Statement] = []
    for relative, unit in group.members:
        path = blocks.path(relative)
        module = expression(lowering.manifest, path, base=blocks.base, block=blocks.block)
        for statement in _calls(module, unit):
            body += where_held(lowering, group, path, statement)
    return blocks.loop(body)


def _calls(module: str, unit: Sharded) -> list[Statement]:
    """Return the call that makes a unit, and the one that keeps it unsharded."""
    made = Line(_call(module, unit), "", unit.note)
    return [made, _keep(module, unit)] if unit.kept and not unit.traced else [made]


def _call(module: str, unit: Sharded) -> Node:
    return call(
        "shard_unit" if unit.traced else "fully_shard",
        module,
        mesh=unit.mesh,
        mp_policy="policy",
        offload_policy="offload" if unit.offloads else None,
        reshard_after_forward=unit.reshard,
        reshard_after_backward="False" if unit.kept and unit.traced else None,
        shard_placement_fn=f"lambda _: Shard({unit.dim})" if unit.dim else None,
    )


def _keep(module: str, unit: Sharded) -> Line:
    return Line(call(f"{module}.set_reshard_after_backward", "False", recurse="False"), "", unit.note)
