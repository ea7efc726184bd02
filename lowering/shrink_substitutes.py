"""Substitutions in a shrunken plan: features that a CPU lacks, and values that would hide differences."""

from __future__ import annotations

from typing import Any, Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.computation.precision import batch_norms
from legoai.dsl.analysis.parallelism.graph import traces, unshards_selectively
from legoai.dsl.analysis.training.schedule import warmup_steps
from legoai.lowering.shrink_rules import changed, of_statement, with_rules
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.cluster import ClusterUse
from legoai.specs.directives.compile import AotEager, Compile, Inductor
from legoai.specs.directives.precision import HighPrecision, Precision
from legoai.specs.directives.require import Requirement
from legoai.specs.directives.shard import Experts, Shard
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.plan import Plan
from legoai.specs.record import replace

_CLIPPED_NORM: Final = 0.01
_ROOM: Final = 2.0**40
_KERNELS_OF_A_CPU: Final = ("default", "math")


def roomy_limit(analysis: Analysis) -> tuple[Requirement, ...]:
    """Return the limit of memory by which units stay unsharded, with room for all of a small model; none otherwise.

    The original's is that of the whole model. `legoai.lowering.verify.memory_limit` finds one that the smaller plan's
    units exceed, which takes the graph of its step.
    """
    if not unshards_selectively(analysis):
        return ()
    return tuple(replace(item, comparison="<=", bound=_ROOM) for item in analysis.plan.memory_limits[:1])


def for_a_cpu(plan: Plan, changes: list[str]) -> Plan:
    """Replace features of a plan that need a GPU by what a CPU supports."""
    cluster = ClusterUse(device="cpu", devices=plan.mesh.world_size, origins=of_statement(plan.cluster))
    found = replace(plan, cluster=cluster)
    if plan.attention.kernel not in _KERNELS_OF_A_CPU:
        changes.append(f"attention `{plan.attention.kernel}`: PyTorch's own choice on a CPU")
        found = replace(found, attention=changed(plan.attention, kernel="default"))
    if plan.offload is not None and not traces(plan):
        changes.append("offload: left out, since a CPU has no other memory")
        found = replace(found, offload=None)
    elif plan.offload is not None:
        for field in ("optimizer", "activations"):
            if getattr(plan.offload, field) == "adaptive":
                changes.append(f"offload: `{field} = all`, since the limit is that of the whole model")
                assert found.offload is not None
                found = replace(found, offload=changed(found.offload, **{field: "all"}))
    if plan.allocator is not None:
        changes.append("allocator: left out, since a CPU has another")
        found = replace(found, allocator=None)
    if plan.compile is not None:
        found = replace(found, compile=_compile(plan.compile, changes))
    return replace(found, shard=tuple(_without_drops(item, changes) for item in found.shard))


def _compile(directive: Compile, changes: list[str]) -> Compile:
    """Capture graphs, but run them without generated kernels."""

    def traced(rule: PathRule[Any]) -> PathRule[Any]:
        if not isinstance(rule.treatment, Inductor):
            return rule
        return replace(rule, treatment=AotEager(fullgraph=rule.treatment.fullgraph))

    if directive.async_tp:
        changes.append("compile: `async_tp` needs symmetric memory, and is left out")
    if any(isinstance(rule.treatment, Inductor) for rule in directive.rules):
        changes.append("compile: `aot_eager` for `inductor`: the same graphs, without generated kernels")
    return changed(with_rules(directive, traced), async_tp=False)


def _without_drops(directive: Shard, changes: list[str]) -> Shard:
    """Remove the experts' capacity: which tokens are dropped depends on the mesh, which would hide differences."""

    def roomy(rule: PathRule[Any]) -> PathRule[Any]:
        if not isinstance(rule.treatment, Experts) or rule.treatment.capacity_factor is None:
            return rule
        changes.append("shard on ep: no `capacity_factor`; what is dropped depends on the mesh")
        return replace(rule, treatment=changed(rule.treatment, capacity_factor=None))

    return with_rules(directive, roomy)


def in_double_precision(plan: Plan, changes: list[str]) -> Plan:
    """Return the plan in fp64 throughout, so that rounding hides no differences."""
    precision = plan.precision
    reduced = plan.fsdp is not None or plan.replicate is not None
    origins = of_statement(precision)
    if any(not isinstance(rule.treatment, HighPrecision) for rule in precision.rules):
        changes.append("precision: fp64 throughout, without float8")
    else:
        changes.append("precision: fp64 throughout")
    double = Precision(master="fp64", param="fp64", reduce="fp64" if reduced else precision.reduce, origins=origins)
    return replace(plan, precision=double)


def in_its_dtypes(plan: Plan, changes: list[str]) -> Plan:
    """Return the plan's dtypes, without float8 products, which a CPU lacks, and without casts that need a policy."""
    precision = plan.precision
    mixed = precision.param != precision.master and (precision.param, precision.master) != ("bf16", "fp32")
    if mixed and plan.fsdp is None and plan.replicate is None:
        changes.append(f"precision: master = {precision.param}, since nothing is left to cast parameters to it")
        plan = replace(plan, precision=changed(precision, master=precision.param))
    if all(isinstance(rule.treatment, HighPrecision) for rule in plan.precision.rules):
        return plan
    changes.append("precision: without float8, of which a CPU has no products")
    return replace(plan, precision=changed(plan.precision, rules=()))


def with_batch_norms_of_a_cpu(plan: Plan, manifest: Manifest, changes: list[str]) -> Plan:
    """Return the plan in fp32 where batch normalisation is in fewer bits, which a CPU lacks."""
    if plan.precision.param in ("fp32", "fp64") or not batch_norms(manifest):
        return plan
    changes.append("precision: fp32, since a CPU has no batch normalisation in fewer bits")
    return replace(plan, precision=changed(plan.precision, master="fp32", param="fp32"))


def with_short_warmup(plan: Plan, changes: list[str]) -> Plan:
    """Shorten the warm-up so that it ends within the compared steps, since its first steps change parameters little."""
    form = plan.schedule.form
    if warmup_steps(plan.schedule) <= 2:
        return plan
    changes.append(f"schedule: warm-up of 2 steps, not {warmup_steps(plan.schedule)}")
    return replace(plan, schedule=changed(plan.schedule, form=changed(form, warmup=2)))


def with_acting_clip(plan: Plan, changes: list[str]) -> Plan:
    """Lower the bound so that the gradients of a small model exceed it, and clipping is compared too."""
    clip = plan.clip
    if clip is None or clip.norm <= _CLIPPED_NORM:
        return plan
    changes.append(f"clip: norm {_CLIPPED_NORM:g}, not {clip.norm:g}, so that it acts")
    return replace(plan, clip=changed(clip, norm=_CLIPPED_NORM))
