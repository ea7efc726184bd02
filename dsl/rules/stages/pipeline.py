"""`pipeline`: rules about stages, micro batches and schedules."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches, pass_micro_batches, samples_at_once
from legoai.dsl.analysis.facts import divisors, replacement
from legoai.dsl.analysis.magnitudes.bounds import idle_share
from legoai.dsl.analysis.repetition.unequal_blocks import help_with_unequal_blocks
from legoai.dsl.analysis.stages.pipeline import is_staged, split_points, stage_count
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.dsl.rules.training.batch import batch_label, pass_label
from legoai.specs.directives.pipeline import SINGLE_STAGE, V_SHAPED, Even, OrderFile

_IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
"""Schedules that compute the micro batches of a pass in equal rounds."""

_COMMON_BUBBLE = 0.25
"""The share of a step beyond which an idle pipeline is worth a word: a quarter of the machines would be idle."""


class StagesDivide(Check):
    """A number of stages that is no multiple of `pp`.

    Every rank of `pp` holds the same number of stages.

    ## Example
    ```
    mesh (pp = 4, dp_shard = 8)
    pipeline on pp (schedule = Interleaved1F1B, stages = 6)
    ```

    ## Use instead
    ```
    mesh (pp = 4, dp_shard = 8)
    pipeline on pp (schedule = Interleaved1F1B, stages = 8)
    ```
    """

    code = "LP501"
    slug = "stages-not-divisible"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        pipeline, mesh = analysis.plan.pipeline, analysis.plan.mesh
        if pipeline is None or pipeline.stages is None or pipeline.stages % mesh.pp == 0:
            return
        near = sorted({max(mesh.pp, pipeline.stages // mesh.pp * mesh.pp), (pipeline.stages // mesh.pp + 1) * mesh.pp})
        yield self.at(
            analysis.span_of(pipeline, "stages"),
            f"{pipeline.stages} stages cannot be laid out evenly over the {mesh.pp} ranks of `pp`",
            label=f"no multiple of {mesh.pp}",
            others=[Label(analysis.span_of(mesh, "pp"), f"`pp` = {mesh.pp}")],
            help=[f"the nearest legal numbers of stages are {' and '.join(map(str, near))}"],
        )


class StagesPerRank(Check):
    """A number of stages per rank that the schedule does not support.

    `GPipe` and `1F1B` hold one stage on each rank; the interleaved schedules and `LoopedBFS` several;
    `ZBVZeroBubble` and `DualPipeV` exactly two, the i-th from the front and the i-th from the back.

    ## Example
    ```
    mesh (pp = 4, dp_shard = 8)
    pipeline on pp (schedule = DualPipeV, stages = 4)
    ```

    ## Use instead
    ```
    mesh (pp = 4, dp_shard = 8)
    pipeline on pp (schedule = DualPipeV, stages = 8)
    ```
    """

    code = "LP502"
    slug = "stages-per-rank"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        pipeline, mesh = analysis.plan.pipeline, analysis.plan.mesh
        if pipeline is None or pipeline.stages is None or isinstance(pipeline.schedule, OrderFile):
            return
        each, rest = divmod(pipeline.stages, mesh.pp)
        schedule = pipeline.schedule
        if rest:
            return
        if schedule in SINGLE_STAGE and each != 1:
            wants, legal = "one stage", [mesh.pp]
        elif schedule in V_SHAPED and each != 2:
            wants, legal = "exactly 2 stages", [2 * mesh.pp]
        elif schedule not in SINGLE_STAGE and each < 2:
            wants, legal = "at least 2 stages", [2 * mesh.pp, 3 * mesh.pp]
        else:
            return
        help = [f"write `stages = {legal[0]}`" + (f", or a larger multiple of {mesh.pp}" if len(legal) > 1 else "")]
        if schedule in SINGLE_STAGE:
            help.append("`Interleaved1F1B` and `LoopedBFS` hold several stages on a rank")
        elif each == 1:
            help.append("with one stage on each rank the schedule is `1F1B`")
        yield self.at(
            analysis.span_of(pipeline, "stages"),
            f"`{schedule}` needs {wants} on each rank, and {pipeline.stages} stages over {mesh.pp} ranks are {each}",
            label=f"{each} on each rank",
            others=[Label(analysis.span_of(mesh, "pp"), f"`pp` = {mesh.pp}")],
            help=help,
            fix=replacement(pipeline, "stages", str(legal[0])),
        )


class EnoughMicroBatches(Check):
    """Fewer micro batches than the schedule needs.

    `1F1B` and `DualPipeV` begin by filling every stage, so they need at least as many micro batches as
    stages.

    ## Example
    ```
    batch (global = 16, micro = 1, seq_len = 8192)
    mesh  (pp = 4, dp_shard = 8)
    pipeline on pp (schedule = 1F1B)
    ```

    ## Use instead
    ```
    batch (global = 128, micro = 1, seq_len = 8192)
    mesh  (pp = 4, dp_shard = 8)
    pipeline on pp (schedule = 1F1B)
    ```
    """

    code = "LP503"
    slug = "too-few-micro-batches"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan = analysis.plan
        pipeline = plan.pipeline
        if (
            pipeline is None
            or isinstance(pipeline.schedule, OrderFile)
            or pipeline.schedule not in ("1F1B", "DualPipeV")
        ):
            return
        count, stages = pass_micro_batches(plan), stage_count(analysis)
        if count is None or stages is None or count >= stages or not is_staged(analysis):
            return
        yield self.at(
            analysis.span_of(pipeline, "schedule"),
            f"`{pipeline.schedule}` needs at least as many micro batches as stages: {stages}, not {count}",
            label=f"{count} micro batches for {stages} stages",
            others=[pass_label(analysis)],
            help=[f"{_at_least(stages, analysis)} gives enough, or use `GPipe`"],
        )


class EqualRounds(Check):
    """Micro batches that do not come out even in the rounds of an interleaved schedule.

    `Interleaved1F1B` and `InterleavedZeroBubble` compute in ⌊micro batches / pp⌋ rounds (one at least), and
    the micro batches must be a multiple of the rounds.

    ## Example
    ```
    batch (global = 88, micro = 1, seq_len = 8192)
    mesh  (pp = 4, dp_shard = 8)
    pipeline on pp (schedule = Interleaved1F1B)
    ```

    ## Use instead
    ```
    batch (global = 96, micro = 1, seq_len = 8192)
    mesh  (pp = 4, dp_shard = 8)
    pipeline on pp (schedule = Interleaved1F1B)
    ```
    """

    code = "LP504"
    slug = "uneven-rounds"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan = analysis.plan
        pipeline = plan.pipeline
        if pipeline is None or isinstance(pipeline.schedule, OrderFile):
            return
        if pipeline.schedule not in _IN_ROUNDS:
            return
        count, ranks = pass_micro_batches(plan), plan.mesh.pp
        if count is None or _even_rounds(count, ranks):
            return
        one = samples_at_once(plan)
        fewer = next(number for number in range(count, 0, -1) if _even_rounds(number, ranks))
        more = next(number for number in range(count, 2 * count + ranks) if _even_rounds(number, ranks))
        help = (
            f"a global batch of {fewer * one} gives {fewer} micro batches, one of {more * one} gives {more}; "
            f"every multiple of {ranks * one} is legal"
            if pipeline.microbatches is None
            else f"write `microbatches = {fewer}` or {more}; every multiple of {ranks} is legal"
        )
        yield self.at(
            analysis.span_of(pipeline, "schedule"),
            f"`{pipeline.schedule}` over {ranks} ranks computes {count} micro batches in {count // ranks} rounds, "
            f"and {count} is no multiple of {count // ranks}",
            label="the rounds do not come out even",
            others=[pass_label(analysis), Label(analysis.span_of(plan.mesh, "pp"), f"`pp` = {ranks}")],
            help=[help],
        )


def _even_rounds(count: int, ranks: int) -> bool:
    return count % max(1, count // ranks) == 0


def _at_least(count: int, analysis: Analysis) -> str:
    """Return what gives a pass of the schedule so many micro batches, or the next number that is legal."""
    plan = analysis.plan
    pipeline, present, one = plan.pipeline, micro_batches(plan) or 0, samples_at_once(plan)
    assert pipeline is not None
    in_rounds = pipeline.schedule in _IN_ROUNDS

    def legal(numbers: Iterable[int]) -> Iterator[int]:
        return (number for number in numbers if not in_rounds or _even_rounds(number, plan.mesh.pp))

    least = next(legal(itertools.count(count)))
    if pipeline.microbatches is None:
        return f"a global batch of {least * one} or more"
    divisor = next(legal(number for number in divisors(present) if number >= count), None) if present else None
    if divisor is not None:
        return f"`microbatches = {divisor}`"
    passes = max(1, -(-present // least))
    return f"`microbatches = {least}` with a global batch of {passes * least * one}"


class BlocksForStages(Check):
    """More stages than the model has repeated blocks, so that a stage would hold none.

    ## Example
    ```
    mesh (pp = 8, dp_shard = 4)
    pipeline on pp (schedule = Interleaved1F1B, stages = 40)
    ```

    ## Use instead
    ```
    mesh (pp = 8, dp_shard = 4)
    pipeline on pp (schedule = Interleaved1F1B, stages = 16)
    ```
    """

    code = "LP505"
    slug = "more-stages-than-blocks"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        pipeline, manifest = analysis.plan.pipeline, analysis.manifest
        if pipeline is None or manifest is None or not isinstance(pipeline.split, str | Even):
            return
        stages = stage_count(analysis)
        blocks = len(split_points(analysis).blocks)
        if stages is None or stages <= blocks:
            return
        at_most = blocks // analysis.plan.mesh.pp * analysis.plan.mesh.pp
        cure = f"at most {at_most} stages have a block each"
        if not at_most:
            cure = help_with_unequal_blocks(analysis) or "name the split points: `split = [PATH, …]`"
        yield self.at(
            analysis.span_of(pipeline, "stages"),
            f"{stages} stages cannot share the model's {blocks} blocks evenly" if blocks else
            f"the model has no repeated blocks that {stages} stages could share evenly",
            label=f"more than {blocks}" if blocks else "nothing to divide",
            others=[Label(analysis.span_of(analysis.plan.model, "family"), f"has {blocks} blocks")],
            help=[cure],
        )  # fmt: skip


class MicroBatchesAgree(Check):
    """A number of micro batches that passes of the schedule do not divide.

    `batch` gives each rank a number of micro batches in a step: the global batch over the micro batch and the
    data-parallel degree. One pass of the schedule takes `microbatches` of them, and a step makes as many passes
    as there are, adding up gradients.

    ## Example
    ```
    batch (global = 256, micro = 1, seq_len = 8192)
    mesh  (pp = 4, dp_shard = 8)
    pipeline on pp (microbatches = 12)
    ```

    ## Use instead
    ```
    batch (global = 256, micro = 1, seq_len = 8192)
    mesh  (pp = 4, dp_shard = 8)
    pipeline on pp (microbatches = 16)
    ```
    """

    code = "LP511"
    slug = "micro-batches-disagree"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        pipeline = analysis.plan.pipeline
        if pipeline is None or pipeline.microbatches is None:
            return
        count = micro_batches(analysis.plan)
        if count is None or count % pipeline.microbatches == 0 or not is_staged(analysis):
            return
        yield self.at(
            analysis.span_of(pipeline, "microbatches"),
            f"the {count} micro batches that the batch has for each rank are no multiple of {pipeline.microbatches}",
            label="the passes do not come out even",
            others=[batch_label(analysis)],
            help=[f"write `microbatches = {count}`, or leave the option out", f"every divisor of {count} is legal"],
            fix=replacement(pipeline, "microbatches", str(count)),
        )


class BubbleIsLarge(Check):
    """A pipeline that is idle for more than a quarter of the step.

    Of the forward and backward passes of p ranks with m micro batches and v equal stages on each rank,
    (p − 1) / (v·m + p − 1) is spent on filling and draining the pipeline (Narayanan et al. 2021, section 2.2).

    ## Example
    ```
    batch (global = 64, micro = 1, seq_len = 8192)
    mesh  (pp = 8, dp_shard = 4)
    pipeline on pp (schedule = 1F1B)
    ```

    ## Use instead
    ```
    batch (global = 64, micro = 1, seq_len = 8192)
    mesh  (pp = 8, dp_shard = 4)
    pipeline on pp (schedule = Interleaved1F1B, stages = 32)
    ```
    """

    code = "LP820"
    slug = "large-bubble"
    severity = "advice"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan = analysis.plan
        pipeline, ranks = plan.pipeline, plan.mesh.pp
        share = idle_share(analysis)
        count, stages = pass_micro_batches(plan), stage_count(analysis)
        if pipeline is None or share is None or count is None or stages is None or share <= _COMMON_BUBBLE:
            return
        each = stages // ranks
        enough = -(-3 * (ranks - 1) // each)
        yield self.at(
            analysis.span_of(pipeline, "schedule"),
            f"with equal stages, each rank waits for {share:.0%} of the forward and backward passes: {count} micro "
            f"batches fill {ranks} ranks with {each} stage{'s' * (each != 1)} each",
            label=f"({ranks} − 1) / ({each} · {count} + {ranks} − 1)",
            others=[pass_label(analysis)],
            help=[
                f"{_at_least(enough, analysis)} brings it down to a quarter or below; so do more stages on each rank, "
                "or a schedule that splits the backward pass"
            ],
        )
