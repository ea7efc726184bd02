"""`replicate`: rules about plain data parallelism, and about gradients that nothing reduces."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.facts import replacement, written
from legoai.dsl.analysis.parallelism.replicate import replicas
from legoai.dsl.analysis.stages.pipeline import is_staged
from legoai.dsl.analysis.training.optimizer import keeps_state
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.specs.units import GIB


class ReplicateWithFsdp(Check):
    """Plain data parallelism around full sharding.

    PyTorch cannot put `DistributedDataParallel` around `fully_shard`. Replicas of shards are hybrid sharding,
    which `fsdp` does itself.

    ## Example
    ```
    mesh (dp_replicate = 4, dp_shard = 8)
    replicate on dp_replicate
    fsdp on dp_shard { layers.* = unit, root = unit }
    ```

    ## Use instead
    ```
    mesh (dp_replicate = 4, dp_shard = 8)
    fsdp on dp_replicate, dp_shard { layers.* = unit, root = unit }
    ```
    """

    code = "LP331"
    slug = "replicate-with-fsdp"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        replicate, fsdp = analysis.plan.replicate, analysis.plan.fsdp
        if replicate is None or fsdp is None or analysis.plan.mesh.dp_replicate == 1:
            return
        twice = "dp_replicate" in fsdp.axes
        axes = ", ".join(("dp_replicate", *(axis for axis in fsdp.axes if axis != "dp_replicate")))
        yield self.at(
            analysis.span_of(replicate),
            "`replicate` and `fsdp` both reduce gradients over `dp_replicate`"
            if twice
            else "`replicate` cannot hold what `fsdp` shards",
            label="reduces them again" if twice else "replicas of shards",
            others=[Label(analysis.span_of(fsdp), "reduces over it too" if twice else "shards the parameters")],
            help=["delete `replicate`"] if twice else [f"delete `replicate` and write `fsdp on {axes}`"],
        )


class UnreducedGradients(Check):
    """Context parallelism without a statement that reduces gradients.

    The ranks of `cp` hold the same parameters and see other tokens, so their gradients must be summed, which
    `fsdp` and `replicate` do.

    ## Example
    ```
    cluster h100_sxm
    mesh (cp = 8)
    context on cp
    ```

    ## Use instead
    ```
    cluster h100_sxm
    mesh (cp = 8)
    context on cp
    fsdp on cp { layers.* = unit, root = unit }
    ```
    """

    code = "LP332"
    slug = "unreduced-gradients"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan = analysis.plan
        if plan.context is None or plan.fsdp is not None or plan.replicate is not None or plan.mesh.cp == 1:
            return
        yield self.at(
            analysis.span_of(plan.context),
            f"nothing sums the gradients of the {plan.mesh.cp} ranks of `cp`",
            label="each rank sees other tokens",
            others=[Label(analysis.span_of(plan.mesh, "cp"), f"{plan.mesh.cp} ranks")],
            help=["add `fsdp on cp { layers.* = unit }`"],
        )


class IdleBucket(Check):
    """A bucket size under a pipeline, which uses no buckets.

    A stage reduces its gradients once, after its last micro batch, when nothing is left to compute beside it. So the
    size of buckets decides nothing, and is refused rather than ignored.

    ## Example
    ```
    mesh (pp = 2, dp_replicate = 16)
    pipeline on pp (schedule = 1F1B)
    replicate on dp_replicate (bucket = 40MiB)
    ```

    ## Use instead
    ```
    mesh (pp = 2, dp_replicate = 16)
    pipeline on pp (schedule = 1F1B)
    replicate on dp_replicate
    ```
    """

    code = "LP333"
    slug = "idle-bucket"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        replicate, pipeline = analysis.plan.replicate, analysis.plan.pipeline
        if replicate is None or not written(replicate, "bucket") or pipeline is None or not is_staged(analysis):
            return
        yield self.at(
            analysis.span_of(replicate, "bucket"),
            "`bucket` has no effect under a pipeline",
            label="no buckets are used",
            others=[Label(analysis.span_of(pipeline), "a stage reduces its gradients after its last micro batch")],
            help=["leave `bucket` out"],
        )


class NoStateToShard(Check):
    """A sharded optimizer that keeps no state.

    `optimizer = sharded` divides the optimizer's state, and gathers the updated parameters for it. `sgd` without
    `momentum` keeps none, so that the gathering buys nothing.

    ## Example
    ```
    mesh (dp_replicate = 32)
    replicate on dp_replicate (optimizer = sharded)
    optimizer sgd(lr = 0.1)
    ```

    ## Use instead
    ```
    mesh (dp_replicate = 32)
    replicate on dp_replicate
    optimizer sgd(lr = 0.1)
    ```
    """

    code = "LP334"
    slug = "no-state-to-shard"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        replicate = replicas(analysis)
        if replicate is None or replicate.optimizer != "sharded" or analysis.manifest is None or keeps_state(analysis):
            return
        yield self.at(
            analysis.span_of(replicate, "optimizer"),
            "`optimizer = sharded` frees no memory: `sgd` without `momentum` keeps no state",
            label="gathers updated parameters for nothing",
            others=[Label(analysis.span_of(analysis.plan.optimizer, "algorithm"), "keeps no state")],
            help=["leave it out, or give `sgd` a `momentum`"],
            fix=replacement(replicate, "optimizer", "replicated"),
        )


class OneBucket(Check):
    """A bucket that takes all gradients of a rank, so that nothing is reduced before the backward pass ends.

    Buckets are reduced while the gradients of earlier layers are still computed. With one bucket for
    everything, computation and communication come one after the other.

    ## Example
    ```
    model   llama3("1b")
    cluster h100_sxm
    mesh    (dp_replicate = 8)
    replicate on dp_replicate (bucket = 8GiB)
    ```

    ## Use instead
    ```
    model   llama3("1b")
    cluster h100_sxm
    mesh    (dp_replicate = 8)
    replicate on dp_replicate (bucket = 100MiB)
    ```
    """

    code = "LP805"
    slug = "one-bucket"
    severity = "advice"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        replicate, manifest, mesh = analysis.plan.replicate, analysis.manifest, analysis.plan.mesh
        if replicate is None or manifest is None or mesh.dp_replicate == 1 or not written(replicate, "bucket"):
            return
        if analysis.plan.pipeline is not None:  # there are no buckets: LP333
            return
        # No gradient is wider than fp32, and no rank has more than its share of every parameter.
        most = manifest.parameter_count * 4 // mesh.tp
        if replicate.bucket >= most:
            yield self.at(
                analysis.span_of(replicate, "bucket"),
                f"one bucket takes all gradients of a rank, {most / GIB:.2g}GiB at most",
                label="nothing is reduced while gradients are computed",
                help=["use smaller buckets; PyTorch's default is `25MiB`"],
            )
