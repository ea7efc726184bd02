"""Shrinking of a plan to one of the same structure that a few processes on one machine can run.

The shrunken plan has the original's statements, rules and treatments, and preserves the properties that they rely on:
which sizes divide which, how many stages a rank holds, which blocks have other treatments than the rest, which
parameters are tied, whether micro batches are accumulated. Only numbers become smaller. Every value keeps its span.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches, pass_micro_batches, passes
from legoai.dsl.analysis.facts import each_rule
from legoai.dsl.analysis.parallelism.context import parts_of_heads
from legoai.dsl.analysis.parallelism.experts import axes_of_ep
from legoai.dsl.analysis.parallelism.graph import traces
from legoai.dsl.analysis.stages.pipeline import first_modules, stage_count
from legoai.lowering.shrink_blocks import (
    Blocks,
    choose_blocks,
    held_of,
    matched_first,
    patterns_of,
    points_of,
    rewritten,
)
from legoai.lowering.shrink_config import block_kinds, keeps_blocks
from legoai.lowering.shrink_model import shrunken_model
from legoai.lowering.shrink_rules import Rewrite, changed, with_every_rule, with_parts, with_rules
from legoai.lowering.shrink_sizes import CannotShrinkError, Sizes
from legoai.lowering.shrink_substitutes import (
    for_a_cpu,
    in_double_precision,
    in_its_dtypes,
    roomy_limit,
    with_acting_clip,
    with_batch_norms_of_a_cpu,
    with_short_warmup,
)
from legoai.specs.directives.base import Directive, Divided, PathRule, Staged, Treatment
from legoai.specs.directives.batch import Batch
from legoai.specs.directives.checkpoint import Budget, Checkpoint, Every
from legoai.specs.directives.comm import ByBytes, Comm, Proactive
from legoai.specs.directives.fsdp import Unit
from legoai.specs.directives.loss import ChunkedLoss
from legoai.specs.directives.mesh import AXES, Mesh
from legoai.specs.directives.pipeline import Even, OrderFile, Pipeline
from legoai.specs.directives.precision import Precision
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.plan import Plan
from legoai.specs.record import replace

MAX_RANKS: Final = 16
"""Most processes on one machine."""

LEFT_OUT_FIRST: Final = ("dp_replicate", "cp", "dp_shard", "tp", "pp")
"""The axes in the order in which they are removed from a mesh that would need more ranks than are allowed."""

_SMALLEST_BUCKET: Final = 1024
_STAGES_OF_RANK: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunken:
    """A plan that a few processes can run.

    Attributes:
        plan: the smaller plan.
        changes: descriptions of what became smaller or was replaced, one line each.
        blocks: the blocks of the model that are kept; None where the model is unchanged.
    """

    plan: Plan
    changes: tuple[str, ...]
    blocks: Blocks | None

    def original(self, path: str) -> str:
        """Return the path in the original model of a module or parameter of the smaller one."""
        return path if self.blocks is None else self.blocks.original(path)


_NOT_COMPARED: Final[dict[str, Any]] = {
    "objective": None, "solved": None, "data": None, "weights": None, "steps": None, "seed": None,
    "save": None, "evaluate": None,
}  # fmt: skip
"""Statements about the run itself, which a comparison decides; of `require` too, all but a limit that a pass reads."""


def shrink(
    analysis: Analysis,
    *,
    ranks: int = MAX_RANKS,
    double: bool = True,
    config: Mapping[str, Any] | None = None,
) -> Shrunken:
    """Return the smallest plan with the structure of a plan that has no holes and no lint errors.

    Args:
        analysis: of the plan, with the manifest of its model.
        ranks: the most ranks that the smaller plan may have; axes are removed in the order of `LEFT_OUT_FIRST` until
            they suffice, which the changes mention.
        double: compute in fp64 throughout, instead of in the plan's dtypes.
        config: the fields of the config file, where the plan names a Hugging Face model.

    Raises:
        CannotShrinkError: the plan reads an order file for more ranks than there are, or its model is a large one from
            a factory, or from a config with fields that are not known here.
        ManifestError: the config cannot be read by `transformers`.
    """
    manifest, count = analysis.manifest, stage_count(analysis)
    assert manifest is not None, "the model could be inspected"
    changes: list[str] = []
    plan = _with_rules_for_stages(analysis, changes)
    mesh = _mesh(plan, ranks, changes, holders=axes_of_ep(analysis))
    smaller = _without_missing_axes(replace(plan, mesh=mesh, require=roomy_limit(analysis), **_NOT_COMPARED), changes)
    smaller = for_a_cpu(smaller, changes)
    smaller = in_double_precision(smaller, changes) if double else in_its_dtypes(smaller, changes)
    smaller = with_batch_norms_of_a_cpu(smaller, manifest, changes)
    pipeline, stages = _pipeline(analysis, smaller)
    seq_len = _sequence_length(smaller)
    split = _split(analysis, pipeline, stages)
    numbers = None if stages is None or count is None else (count, stages)
    kept = keeps_blocks(plan, manifest, config)
    kinds = None if kept else block_kinds(plan, config)
    blocks = None if kept else choose_blocks(plan, manifest, stages=numbers, split=split, kinds=kinds)
    sizes = Sizes(kept=None if blocks is None else blocks.kept, seq_len=seq_len, tp=parts_of_heads(plan),
                  tp_now=parts_of_heads(smaller), ep=plan.mesh.ep, ep_now=mesh.ep, double=double)  # fmt: skip
    model, ratio = shrunken_model(plan, manifest, sizes, config, changes)
    if model is plan.model:
        blocks = None
    batch, pipeline = _batch(analysis, smaller, pipeline, seq_len, changes)
    if pipeline is not None and split:
        pipeline = changed(pipeline, split=split if blocks is None else points_of(blocks, split))
    smaller = replace(smaller, model=model, batch=batch, pipeline=pipeline)
    smaller = with_short_warmup(smaller, changes)
    smaller = with_acting_clip(smaller, changes)
    smaller = _with_buckets(smaller, analysis, blocks, changes)
    if blocks is not None:
        smaller = with_every_rule(smaller, _fewer_first(blocks, manifest, changes))
    smaller = with_every_rule(smaller, _renamed(blocks))
    smaller = with_every_rule(smaller, _every(changes))
    return Shrunken(plan=_bytes(smaller, ratio, changes), changes=tuple(changes), blocks=blocks)


def _with_rules_for_stages(analysis: Analysis, changes: list[str]) -> Plan:
    """Return the plan with one rule for each treatment of `stages([…])`, since the smaller plan has other stages."""
    manifest, plan = analysis.manifest, analysis.plan
    assert manifest is not None
    found = plan
    for directive in (plan.fsdp, plan.checkpoint):
        if directive is None or not any(isinstance(rule.treatment, Staged) for rule in directive.rules):
            continue
        rules: list[PathRule[Any]] = []
        for rule in directive.rules:
            if not isinstance(rule.treatment, Staged):
                rules.append(rule)
                continue
            of_rule = analysis.assigned(directive).by_path.items()
            own = {path: one.treatment for path, one in of_rule if one.origin == rule.origin}
            rules += [replace(rule, path=path, treatment=one) for path, one in patterns_of(own, manifest)]
            changes.append(f"{directive.keyword}: a rule for each treatment of `{rule.path} = stages(…)`")
        found = replace(found, **{directive.keyword: changed(directive, rules=tuple(rules))})
    return found


def _mesh(plan: Plan, ranks: int, changes: list[str], *, holders: Sequence[str]) -> Mesh:
    """Return axes of the fewest ranks that preserve the structure: 2, or as many as subgroups or an order file need."""
    mesh = plan.mesh
    sizes = {axis: min(2, mesh.size(axis)) for axis in AXES}
    smallest = dict.fromkeys(AXES, 1)
    if plan.pipeline is not None and isinstance(plan.pipeline.schedule, OrderFile):
        sizes["pp"] = smallest["pp"] = mesh.pp
    if (gathered := _gathered_axis(plan)) is not None:
        smallest[gathered] = 2
    if _in_groups(plan) and mesh.dp_shard > 2:
        sizes["dp_shard"] = 4

    def holding(now: Mapping[str, int]) -> int:
        """Ranks that hold all experts together."""
        return math.prod(now[axis] for axis in holders)

    everyone = math.prod(map(mesh.size, holders))
    if 1 < mesh.ep < everyone and holding(sizes) == 2:
        axis = "dp_shard" if mesh.dp_shard >= mesh.cp else "cp"
        sizes[axis] = 4
    for axis in LEFT_OUT_FIRST:
        needed = math.prod(size for name, size in sizes.items() if name != "ep")
        if needed <= ranks:
            break
        if sizes[axis] > 2 and (needed * 2 // sizes[axis] <= ranks or axis == gathered):
            changes.append(f"`{axis}` = 2 has no sub-groups: {needed} ranks would be needed, {ranks} are allowed")
            sizes[axis] = 2
        elif sizes[axis] > smallest[axis]:
            changes.append(f"`{axis}` is left out: {needed} ranks would be needed, {ranks} are allowed")
            sizes[axis] = smallest[axis]
    needed = math.prod(size for name, size in sizes.items() if name != "ep")
    if needed > ranks:
        held = [f"the order file is for {mesh.pp} ranks"] if smallest["pp"] > 1 else []
        held += [] if gathered is None else [f"`backend = graph` gathers over two ranks of `{gathered}` at least"]
        raise CannotShrinkError(f"{' and '.join(held)}, and {ranks} {'is' if ranks == 1 else 'are'} allowed")
    if mesh.ep > 1:
        sizes["ep"] = holding(sizes) if mesh.ep == everyone else min(2, holding(sizes))
    words = [f"{axis} {mesh.size(axis)} → {size}" for axis, size in sizes.items() if size != mesh.size(axis)]
    if words:
        changes.insert(0, f"mesh: {', '.join(words)}; {needed} {'rank' if needed == 1 else 'ranks'}")
    return changed(mesh, **sizes)


def _gathered_axis(plan: Plan) -> str | None:
    """Return the axis over which a step that is one graph gathers parameters; None for other plans."""
    if plan.fsdp is None or not traces(plan):
        return None
    sharded = (axis for axis in ("dp_shard", "cp") if axis in plan.fsdp.axes)
    return next((axis for axis in sharded if plan.mesh.size(axis) > 1), None)


def _in_groups(plan: Plan) -> bool:
    """Whether parameters are sharded over a part of the ranks after forward."""
    return plan.fsdp is not None and any(
        isinstance(rule.treatment, Unit)
        and isinstance(rule.treatment.reshard, int)
        and rule.treatment.reshard < plan.mesh.dp_shard
        for rule in each_rule(plan.fsdp)
    )


def _without_missing_axes(plan: Plan, changes: list[str]) -> Plan:
    """Return the plan without statements on removed axes, and with subgroups that fit the smaller axes."""
    mesh = plan.mesh
    shard = tuple(item for item in plan.shard if mesh.size(item.axes[0]) > 1 or not _is_left_out(item.axes[0], changes))
    found = replace(plan, shard=shard)
    if _is_left_out("pp", changes):
        found = replace(found, pipeline=None)
    if _is_left_out("cp", changes):
        found = replace(found, context=None)
    if plan.replicate is not None and _is_left_out("dp_replicate", changes):
        found = replace(found, replicate=None)
    if plan.fsdp is not None:
        axes = tuple(axis for axis in plan.fsdp.axes if not _is_left_out(axis, changes))
        fsdp = changed(plan.fsdp, axes=axes or plan.fsdp.axes[-1:])
        found = replace(found, fsdp=with_rules(fsdp, lambda rule: _in_smaller_group(rule, mesh.dp_shard)))
    if plan.replicate is not None and found.replicate is None and found.fsdp is None:
        found = replace(found, precision=_without_reduction(plan.precision))
    return found


def _without_reduction(precision: Precision) -> Precision:
    """Return the dtypes without those that only the units of `fsdp` and `replicate` use."""
    carried = {item.field: item.default for item in precision.options if item.field in ("reduce", "output")}
    origins = {name: origin for name, origin in precision.origins.items() if name not in carried}
    return changed(precision, **carried, origins=origins)


def _is_left_out(axis: str, changes: list[str]) -> bool:
    return any(text.startswith(f"`{axis}` is left out") for text in changes)


def _in_smaller_group(rule: PathRule[Any], size: int) -> PathRule[Any]:
    def smaller(unit: Treatment) -> Treatment:
        if isinstance(unit, Unit) and isinstance(unit.reshard, int):
            return changed(unit, reshard="after_forward" if size < 2 else 2)
        return unit

    return with_parts(rule, smaller)


def _pipeline(analysis: Analysis, smaller: Plan) -> tuple[Pipeline | None, int | None]:
    """Return the pipeline with as many stages on each rank, and the number of its stages."""
    pipeline, count = smaller.pipeline, stage_count(analysis)
    if pipeline is None or count is None:
        return None, None
    if isinstance(pipeline.schedule, OrderFile):
        return pipeline, count
    stages = min(count // analysis.plan.mesh.pp, _STAGES_OF_RANK) * smaller.mesh.pp
    return changed(pipeline, stages=None if pipeline.stages is None else stages), stages


def _split(analysis: Analysis, pipeline: Pipeline | None, stages: int | None) -> tuple[str, ...]:
    """Return as many split points as there are stages, spread evenly and including the last; none for an even split."""
    points = first_modules(analysis)
    if pipeline is None or isinstance(pipeline.split, str | Even) or stages is None or points is None:
        return ()
    wanted = stages - 1
    return tuple(points[(place + 1) * len(points) // wanted - 1] for place in range(min(wanted, len(points))))


def _sequence_length(plan: Plan) -> int | None:
    """Return a length divisible for tensor and context parallelism, and for the loss's chunks; None without text."""
    if plan.batch.seq_len is None:
        return None
    step = plan.mesh.tp * plan.mesh.cp * 2
    if isinstance(plan.loss.form, ChunkedLoss):
        step = math.lcm(step, plan.loss.form.n)
    return step * max(1, -(-min(32, plan.batch.length) // step))


def _batch(
    analysis: Analysis, smaller: Plan, pipeline: Pipeline | None, seq_len: int | None, changes: list[str]
) -> tuple[Batch, Pipeline | None]:
    """Return micro batches of at most two sequences: as many as the schedule needs; two where gradients accumulate."""
    plan = analysis.plan
    batch, mesh = plan.batch, smaller.mesh
    accumulation, whole, turns = micro_batches(plan), pass_micro_batches(plan), passes(plan)
    assert accumulation is not None, "the plan has no errors, so that its batch divides"
    assert whole is not None
    assert turns is not None
    count = min(2, accumulation)
    if pipeline is not None:
        is_given = isinstance(pipeline.schedule, OrderFile)
        one_pass = whole if is_given else min(whole, _one_pass(analysis, smaller, whole))
        count = one_pass * min(2, turns)
        if pipeline.microbatches is not None:
            pipeline = changed(pipeline, microbatches=one_pass)
    micro = min(2, batch.micro_batch)
    values = {"global_batch": micro * mesh.data_parallel * count, "micro_batch": micro, "seq_len": seq_len}
    words = [
        f"{batch.option(field).name} {getattr(batch, field)} → {value}"
        for field, value in values.items()
        if value != getattr(batch, field)
    ]
    if words:
        changes.append(f"batch: {', '.join(words)}")
    ramp = batch.ramp
    if ramp is not None:
        changes.append("batch: a ramp of one step with half of the batch")
        ramp = changed(ramp, batches=(micro * mesh.data_parallel,), until=(1,))
    return changed(batch, **values, ramp=ramp), pipeline


def _one_pass(analysis: Analysis, smaller: Plan, whole: int) -> int:
    """Return micro batches that fill every stage; not a multiple of the ranks where the original number was none."""
    plan, count = analysis.plan, stage_count(analysis)
    assert plan.pipeline is not None
    assert count is not None
    ranks = smaller.mesh.pp
    uneven = whole % plan.mesh.pp != 0
    if uneven and plan.pipeline.schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        return ranks + 1  # a single round, for any number
    return max(4, count // plan.mesh.pp * ranks) + uneven


def _with_buckets(plan: Plan, analysis: Analysis, blocks: Blocks | None, changes: list[str]) -> Plan:
    """Return the plan with buckets of the kept modules, the largest first, so that small buckets still share some."""
    if plan.comm is None or blocks is None:
        return plan
    decided = Counter(id(rule) for path, rule in analysis.assigned(plan.comm).by_path.items() if blocks.keeps(path))

    def bucket(rule: PathRule[Any]) -> PathRule[Any]:
        counts, left = rule.treatment.by, decided[id(rule)]
        if not isinstance(counts, tuple) or sum(counts) == left:
            return rule
        kept: list[int] = []
        for count in sorted(counts, reverse=True):
            kept.append(min(count, left - sum(kept)))
        kept = [count for count in kept if count]
        changes.append(f"comm: buckets of {kept} modules for {list(counts)}")
        return replace(rule, treatment=changed(rule.treatment, by=tuple(kept)))

    return replace(plan, comm=with_rules(plan.comm, bucket))


def _renamed(blocks: Blocks | None) -> Rewrite:
    def rewrite(directive: Directive, rule: PathRule[Any]) -> PathRule[Any] | None:
        path = rule.path if blocks is None else rewritten(blocks, rule.path)
        return None if path is None else replace(rule, path=path)

    return rewrite


def _fewer_first(blocks: Blocks, manifest: Manifest, changes: list[str]) -> Rewrite:
    """Reduce `first(n, …)` to as many as are left of the first blocks."""

    def rewrite(directive: Directive, rule: PathRule[Any]) -> PathRule[Any]:
        divided = rule.treatment
        if not isinstance(divided, Divided):
            return rule
        left = held_of(blocks, manifest, matched_first(manifest, rule))
        changes.append(f"{directive.keyword}: first({left}, …) for first({divided.n}, …)")
        return replace(rule, treatment=changed(divided, n=left) if left else divided.others)

    return rewrite


def _every(changes: list[str]) -> Rewrite:
    """Reduce `every(n)` to every second block, since there are few."""

    def rewrite(directive: Directive, rule: PathRule[Any]) -> PathRule[Any]:
        treatment = rule.treatment
        if not isinstance(directive, Checkpoint) or not isinstance(treatment, Every) or treatment.n <= 2:
            return rule
        changes.append(f"checkpoint: every(2) for every({treatment.n})")
        return replace(rule, treatment=changed(treatment, n=2))

    return rewrite


def _bytes(plan: Plan, ratio: float, changes: list[str]) -> Plan:
    """Scale sizes in bytes with the blocks' parameters, so that they hold as many blocks as before."""

    def scaled(value: int, what: str) -> int:
        smaller = max(_SMALLEST_BUCKET, round(value * ratio))
        if smaller >= value:
            return value
        changes.append(f"{what}: {value} → {smaller} bytes")
        return smaller

    found = plan
    if plan.replicate is not None:
        bucket = scaled(plan.replicate.bucket, "replicate: bucket")
        found = replace(found, replicate=changed(plan.replicate, bucket=bucket))
    if plan.comm is not None:
        found = replace(found, comm=_comm(plan.comm, scaled))
    if plan.checkpoint is not None:

        def kept(treatment: Treatment) -> Treatment:
            if not isinstance(treatment, Budget) or not isinstance(treatment.amount, int) or treatment.amount <= 1:
                return treatment
            return changed(treatment, amount=scaled(treatment.amount, "checkpoint: budget"))

        found = replace(found, checkpoint=with_rules(plan.checkpoint, lambda rule: with_parts(rule, kept)))
    return found


def _comm(comm: Comm, scaled: Callable[[int, str], int]) -> Comm:
    def bucket(rule: PathRule[Any]) -> PathRule[Any]:
        by = rule.treatment.by
        if not isinstance(by, ByBytes):
            return rule
        return replace(rule, treatment=changed(rule.treatment, by=changed(by, n=scaled(by.n, "comm: bucket"))))

    found = with_rules(comm, bucket)
    if isinstance(comm.prefetch, Proactive):
        limit = scaled(comm.prefetch.limit, "comm: prefetch limit")
        found = changed(found, prefetch=changed(comm.prefetch, limit=limit))
    return found
