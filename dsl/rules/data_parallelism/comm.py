"""`comm`: rules about the schedule of collectives."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches
from legoai.dsl.analysis.communication.comm import bucket_rules, prefetching_units
from legoai.dsl.analysis.communication.compiler_buckets import BY_COMPILER
from legoai.dsl.analysis.facts import following, grouped, replacement, written
from legoai.dsl.analysis.parallelism.fsdp import fsdp_units
from legoai.dsl.analysis.parallelism.graph import is_traced, reorders, unshards_selectively
from legoai.dsl.analysis.stages.pipeline import is_staged
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.dsl.rules.training.batch import batch_label
from legoai.specs.directives.comm import Bucket, Comm, Proactive, Units
from legoai.specs.directives.fsdp import Fsdp


def _prefetching(analysis: Analysis) -> tuple[Comm, Fsdp, Units] | None:
    """The statements of a plan that gathers a number of units ahead; None of another, or of an unknown model."""
    comm, fsdp = analysis.plan.comm, analysis.plan.fsdp
    if comm is None or fsdp is None or not isinstance(comm.prefetch, Units) or analysis.manifest is None:
        return None
    return comm, fsdp, comm.prefetch


class CommWithoutFsdp(Check):
    """A schedule of gathers in a plan that gathers nothing.

    `comm` speaks of the collectives of `fsdp`; only `reduce` also of those of `replicate`.

    ## Example
    ```
    mesh (dp_replicate = 32)
    replicate on dp_replicate
    comm (reorder = true)
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    comm (prefetch = units(forward = 2, backward = 2))
    ```
    """

    code = "LP661"
    slug = "comm-without-fsdp"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan = analysis.plan
        comm = plan.comm
        if comm is None or plan.fsdp is not None:
            return
        for field in ("reorder", "prefetch", "unshard", "reduce", "profile"):
            if written(comm, field) and not (field == "reduce" and plan.replicate is not None):
                what = "nothing is reduced between ranks" if field == "reduce" else "without `fsdp` nothing is gathered"
                yield self.at(analysis.span_of(comm, field), f"`{field}` has no effect: {what}", label="has no effect")
        for rule in comm.rules:
            yield self.at(
                rule.origin.written,
                "the bucket has no effect: without `fsdp` nothing is gathered",
                label="has no effect",
                help=["`replicate on dp_replicate (bucket = 25MB)` sets the buckets of plain data parallelism"],
            )


class BucketWithoutUnit(Check):
    """A bucket for modules that hold no unit.

    Units are gathered and reduced, and their parameters together. A bucket joins units; a module inside of a unit has
    no collective of its own. `bucket(compiler)` has checks of its own.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    comm { layers.*.feed_forward = bucket(module) }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    comm { layers.* = bucket(module) }
    ```
    """

    code = "LP662"
    slug = "bucket-without-unit"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan = analysis.plan
        if plan.comm is None or plan.fsdp is None:
            return
        with_units = {id(rule) for rule, _ in bucket_rules(analysis)}
        for rule, paths in grouped(following(analysis, plan.comm, Bucket).items()):
            if id(rule) in with_units or rule.treatment.by == BY_COMPILER:
                continue
            yield self.at(
                rule.path_origin.written,
                f"the bucket has no effect: neither `{paths[0]}` nor a module inside of it is a unit",
                label="holds no unit",
                others=[Label(analysis.span_of(plan.fsdp), "makes the units")],
                help=["name the units here, or make these modules units in `fsdp`"],
            )


class BucketCounts(Check):
    """Buckets of so many modules each that are not all modules that the rule matches.

    A list in `bucket` says how many of them, one after another in the model's order, share a collective. The numbers
    add up to the modules that the rule decides; those that a more specific rule decides are not among them.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    comm { layers.* = bucket([8, 8, 8]) }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    comm { layers.* = bucket([2, 6, 12, 12]) }
    ```
    """

    code = "LP666"
    slug = "bucket-counts"
    severity = "error"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        for rule, paths in grouped(following(analysis, analysis.plan.comm, Bucket).items()):
            counts = rule.treatment.by
            if not isinstance(counts, tuple) or sum(counts) == len(paths):
                continue
            yield self.at(
                analysis.span_of(rule.treatment, "by"),
                f"the buckets hold {sum(counts)} modules, and `{rule.path}` decides {len(paths)}",
                label=f"{sum(counts)} in {len(counts)} {'bucket' if len(counts) == 1 else 'buckets'}",
                help=[f"give numbers that add up to {len(paths)}"],
            )


class ReduceWithoutAccumulation(Check):
    """A choice of when to reduce gradients in a step of one micro batch.

    The first micro batch is also the last.

    ## Example
    ```
    batch (global = 32, micro = 1, seq_len = 8192)
    mesh  (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    comm (reduce = last_micro_batch)
    ```

    ## Use instead
    ```
    batch (global = 64, micro = 1, seq_len = 8192)
    mesh  (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    comm (reduce = last_micro_batch)
    ```
    """

    code = "LP663"
    slug = "reduce-without-accumulation"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan = analysis.plan
        if plan.comm is None or not written(plan.comm, "reduce") or micro_batches(plan) != 1:
            return
        yield self.at(
            analysis.span_of(plan.comm, "reduce"),
            f"`reduce = {plan.comm.reduce}` has no effect: a step has one micro batch",
            label="has no effect",
            others=[batch_label(analysis)],
            help=["leave the option out"],
        )


class ReduceUnderPipeline(Check):
    """A choice of when to reduce gradients that a pipeline does not have.

    PyTorch's schedules reduce the gradients of a stage once, after its last micro batch.

    ## Example
    ```
    mesh (pp = 4, dp_shard = 8)
    fsdp on dp_shard { layers.* = unit(reshard = after_backward) }
    pipeline on pp (schedule = 1F1B)
    comm (reduce = every_micro_batch)
    ```

    ## Use instead
    ```
    mesh (pp = 4, dp_shard = 8)
    fsdp on dp_shard { layers.* = unit(reshard = after_backward) }
    pipeline on pp (schedule = 1F1B)
    comm (reduce = last_micro_batch)
    ```
    """

    code = "LP664"
    slug = "reduce-under-pipeline"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        pipeline, comm = analysis.plan.pipeline, analysis.plan.comm
        if comm is None or not written(comm, "reduce") or comm.reduce != "every_micro_batch":
            return
        if pipeline is None or not is_staged(analysis):
            return
        yield self.at(
            analysis.span_of(comm, "reduce"),
            "`reduce = every_micro_batch` has no effect: a pipeline reduces after a stage's last micro batch",
            label="has no effect",
            others=[Label(analysis.span_of(pipeline), "the pipeline")],
            help=["write `last_micro_batch`, or leave the option out"],
            fix=replacement(comm, "reduce", "last_micro_batch"),
        )


class PrefetchOfNothing(Check):
    """Prefetching or reordering where nothing is gathered ahead.

    Units that reshard after backward, or `never`, are still there when the backward pass begins. Where the whole model
    is one unit, there is none to gather ahead. Under `backend = graph` `reorder` and `proactive(…)` have no effect
    then either: they move the collectives of a unit past the computation of another one.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard {
      layers.* = unit(reshard = after_backward)
      root     = unit
    }
    comm (prefetch = units(backward = 2))
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard {
      layers.* = unit(reshard = after_forward)
      root     = unit
    }
    comm (prefetch = units(backward = 2))
    ```
    """

    code = "LP665"
    slug = "prefetch-of-nothing"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        yield from self._of_a_graph(analysis)
        found = _prefetching(analysis)
        if found is None:
            return
        comm, fsdp, prefetch = found
        if not prefetching_units(analysis):
            yield self.at(
                analysis.span_of(comm, "prefetch"),
                "`prefetch` has no effect: the model is one unit",
                label="has no effect",
                others=[Label(analysis.span_of(fsdp), "makes one unit")],
                help=["make every block a unit: `layers.* = unit`"],
            )
            return
        reshards = {unit.reshard for unit in fsdp_units(analysis).values()}
        for field, gathered in (
            ("forward", reshards),
            ("backward", reshards - {"never", "after_backward"}),
        ):
            if written(prefetch, field) and getattr(prefetch, field) > 0 and not gathered:
                yield self.at(
                    analysis.span_of(prefetch, field),
                    f"`{field} = {getattr(prefetch, field)}` has no effect: no unit is gathered in the {field} pass",
                    label="has no effect",
                    others=[Label(analysis.span_of(fsdp), "how units reshard")],
                )

    def _of_a_graph(self, analysis: Analysis) -> Iterator[Diagnostic]:
        """One unit is gathered where forward begins, and reduced where backward ends, unless backward gathers too."""
        comm, fsdp = analysis.plan.comm, analysis.plan.fsdp
        if comm is None or fsdp is None or not is_traced(analysis) or analysis.manifest is None:
            return
        if prefetching_units(analysis) or fsdp_units(analysis)[""].is_resharded_after_forward:
            return
        moves = {"reorder": reorders(analysis), "prefetch": isinstance(comm.prefetch, Proactive)}
        for field in (field for field, moves_some in moves.items() if moves_some):
            yield self.at(
                analysis.span_of(comm, field),
                f"`{field}` has no effect: the model is one unit, and computes nothing beside its collectives",
                label="has no effect",
                others=[Label(analysis.span_of(fsdp), "makes one unit")],
                help=["make every block a unit: `layers.* = unit`"],
            )


class UnshardOfNothing(Check):
    """Units that always stay gathered, where memory is to decide which do.

    `reshard = never` keeps a unit for a whole step. In a step of one micro batch `after_backward` keeps it as long as
    it is needed.

    ## Example
    ```
    batch (global = 32, micro = 1, seq_len = 8192)
    mesh  (dp_shard = 32)
    fsdp on dp_shard (backend = graph) {
      layers.* = unit(reshard = after_backward)
      root     = unit(reshard = after_backward)
    }
    comm (unshard = selective)
    require peak_memory <= 70GiB
    ```

    ## Use instead
    ```
    batch (global = 32, micro = 1, seq_len = 8192)
    mesh  (dp_shard = 32)
    fsdp on dp_shard (backend = graph) {
      layers.* = unit
      root     = unit(reshard = after_backward)
    }
    comm (unshard = selective)
    require peak_memory <= 70GiB
    ```
    """

    code = "LP667"
    slug = "unshard-of-nothing"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan = analysis.plan
        if plan.comm is None or plan.fsdp is None or analysis.manifest is None:
            return
        if not unshards_selectively(analysis) or is_staged(analysis):
            return
        stay = {"never"} if micro_batches(plan) != 1 else {"never", "after_backward"}
        if {unit.reshard for unit in fsdp_units(analysis).values()} <= stay:
            yield self.at(
                analysis.span_of(plan.comm, "unshard"),
                "`unshard = selective` has no effect: all units stay gathered for as long as they are needed",
                label="has no effect",
                others=[Label(analysis.span_of(plan.fsdp), "how units reshard")],
                help=["leave the option out, or write `unit(reshard = after_forward)`"],
            )


class PrefetchOfAll(Check):
    """Prefetching so many units ahead that the whole model is gathered.

    Sharding then saves no memory in that pass.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    comm (prefetch = units(forward = 64))
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    comm (prefetch = units(forward = 2))
    ```
    """

    code = "LP826"
    slug = "prefetch-of-all"
    severity = "advice"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        found = _prefetching(analysis)
        if found is None:
            return
        _, fsdp, prefetch = found
        count = len(fsdp_units(analysis))
        for field in ("forward", "backward"):
            ahead = getattr(prefetch, field)
            if count > 2 and ahead >= count - 1:
                yield self.at(
                    analysis.span_of(prefetch, field),
                    f"gathering {ahead} units ahead holds the whole model: there are {count} units",
                    label="gathers everything",
                    others=[Label(analysis.span_of(fsdp), f"makes {count} units")],
                    help=["one or two units ahead are mostly enough; `proactive(limit = 4GiB)` bounds it by memory"],
                )
