"""`fsdp`: rules about the axes that units are sharded over, and when their parameters are freed."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches
from legoai.dsl.analysis.blocks import span_of
from legoai.dsl.analysis.facts import each_rule, listed, replacement, written
from legoai.dsl.analysis.parallelism.fsdp import FsdpUnit, fsdp_units, resharding
from legoai.dsl.analysis.parallelism.mesh import replicating_axes, shard_ranks
from legoai.dsl.analysis.parallelism.shard import last_module
from legoai.dsl.analysis.stages.pipeline import is_staged, splits_backward
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Edit, Fix, Label
from legoai.dsl.frontend.paths import ROOT
from legoai.dsl.rules.base import Check
from legoai.dsl.rules.devices.mesh import legal_divisors
from legoai.dsl.rules.training.batch import batch_label
from legoai.specs.directives.fsdp import NoUnit, Unit
from legoai.specs.directives.mesh import AXES


class ShardingAxes(Check):
    """Axes of `fsdp` that are not a replication axis followed by a sharding axis.

    One axis shards: `fsdp on dp_shard`, or `cp`, whose ranks hold the same parameters too. With
    `dp_replicate` in front, shards are replicated over it (hybrid sharding). `dp_replicate` alone shards
    nothing.

    ## Example
    ```
    mesh (dp_replicate = 4, dp_shard = 8)
    fsdp on dp_shard, dp_replicate { layers.* = unit, root = unit }
    ```

    ## Use instead
    ```
    mesh (dp_replicate = 4, dp_shard = 8)
    fsdp on dp_replicate, dp_shard { layers.* = unit, root = unit }
    ```
    """

    code = "LP321"
    slug = "sharding-axes"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        fsdp = analysis.plan.fsdp
        if fsdp is None:
            return
        span = analysis.span_of(fsdp, "axes")
        if fsdp.axes == ("dp_replicate",):
            yield self.at(
                span,
                "`fsdp on dp_replicate` shards nothing: whole replicas lie along `dp_replicate`",
                label="no axis to shard over",
                help=[
                    "to keep whole replicas, write `replicate on dp_replicate`",
                    "to shard, call the axis `dp_shard` in the mesh, and write `fsdp on dp_shard`",
                ],
            )
            return
        nested = tuple(sorted(fsdp.axes, key=AXES.index))
        if fsdp.axes != nested:
            text = ", ".join(nested)
            yield self.at(
                span,
                f"the axes of `fsdp` are nested {listed(nested)}, outermost first",
                label="in another order",
                help=[f"write `fsdp on {text}`"],
                fix=Fix(f"write `{text}`", (Edit(span, text),), safe=True),
            )


class ReshardSize(Check):
    """A number of ranks to reshard to that does not divide the ranks that a unit is sharded over.

    `reshard = n` keeps, between forward and backward, shards over groups of `n` ranks of those that the unit
    is sharded over.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit(reshard = 12), root = unit }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit(reshard = 8), root = unit }
    ```
    """

    code = "LP322"
    slug = "reshard-size"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        fsdp = analysis.plan.fsdp
        if fsdp is None:
            return
        for rule in each_rule(fsdp):
            if not isinstance(rule.treatment, Unit) or not isinstance(rule.treatment.reshard, int):
                continue
            ranks = shard_ranks(analysis)
            size = rule.treatment.reshard
            if ranks % size:
                axes = [axis for axis in fsdp.axes if axis != "dp_replicate"]
                if not axes:
                    continue  # an error of its own
                yield self.at(
                    analysis.span_of(rule.treatment, "reshard"),
                    f"`reshard` = {size} does not divide the {ranks} rank{'s' * (ranks > 1)} of {listed(axes)}",
                    label="groups of this many ranks",
                    others=[
                        Label(analysis.span_of(analysis.plan.mesh, axis), f"{analysis.plan.mesh.size(axis)} ranks")
                        for axis in axes
                        if analysis.plan.mesh.size(axis) > 1
                    ],
                    help=[
                        f"legal numbers are {legal_divisors(ranks, least=2)}" if ranks > 1 else "write `after_forward`"
                    ],
                )


class ReshardToAllRanks(Check):
    """Resharding to as many ranks as a unit is sharded over.

    `fully_shard` takes this for `after_forward`: the backward pass gathers from all ranks.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit(reshard = 32), root = unit }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit(reshard = 8), root = unit }
    ```
    """

    code = "LP329"
    slug = "reshard-to-all-ranks"
    severity = "advice"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        fsdp = analysis.plan.fsdp
        # Fewer ranks hold the same experts, for which the number means something else.
        if fsdp is None or analysis.plan.mesh.ep > 1:
            return
        for rule in each_rule(fsdp):
            unit = rule.treatment
            if not isinstance(unit, Unit) or not isinstance(unit.reshard, int) or unit.reshard == 1:
                continue
            # Of what a solver or the command line tries, one number may well be all ranks.
            if unit.origin("reshard").decider != "human" or unit.reshard != shard_ranks(analysis):
                continue
            yield self.at(
                analysis.span_of(unit, "reshard"),
                f"`reshard = {unit.reshard}` is `after_forward`: units are sharded over {unit.reshard} ranks",
                label="all ranks",
                others=[Label(analysis.span_of(fsdp), "shards the parameters")],
                help=["write `after_forward`, or a smaller number to gather from fewer ranks in the backward pass"],
                fix=replacement(unit, "reshard", "after_forward"),
            )


class ReshardWithinMesh(Check):
    """Resharding to a number of ranks where `fsdp` shards over a part of the mesh.

    `reshard = n` needs groups of `n` ranks, which `fully_shard` makes on its mesh. Beside `tp` and `pp` that mesh is
    one of
    several: PyTorch refuses DTensors of `tp`, and its groups on several meshes deadlock. Where `cp` holds copies of the
    shards, the ranks of a group are not consecutive, and PyTorch cannot make it.

    ## Example
    ```
    mesh (dp_shard = 16, tp = 2)
    shard on tp { layers.*.feed_forward.{w1, w3} = colwise, layers.*.feed_forward.w2 = rowwise }
    fsdp on dp_shard { layers.* = unit(reshard = 8), root = unit }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 16, tp = 2)
    shard on tp { layers.*.feed_forward.{w1, w3} = colwise, layers.*.feed_forward.w2 = rowwise }
    fsdp on dp_shard { layers.* = unit(reshard = after_forward), root = unit }
    ```
    """

    code = "LP328"
    slug = "reshard-within-mesh"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        fsdp, mesh = analysis.plan.fsdp, analysis.plan.mesh
        if fsdp is None:
            return
        copies = "cp" in replicating_axes(analysis)
        beside = next((axis for axis in ("tp", "pp") if mesh.size(axis) > 1), "cp" if copies else None)
        if beside is None:
            return
        ranks = shard_ranks(analysis)
        for rule in each_rule(fsdp):
            unit = rule.treatment
            if not isinstance(unit, Unit) or not isinstance(unit.reshard, int) or ranks % unit.reshard:
                continue
            if unit.reshard == ranks:
                continue  # the same as `after_forward`
            yield self.at(
                analysis.span_of(unit, "reshard"),
                f"beside `{beside}` a unit cannot reshard to groups of {unit.reshard} of its {ranks} ranks",
                label="groups that PyTorch cannot make",
                others=[Label(analysis.span_of(mesh, beside), f"{mesh.size(beside)} ranks of `{beside}`")],
                help=[
                    *(
                        ["shard over `cp` too: `fsdp on " + ", ".join((*fsdp.axes, "cp")) + "`"]
                        if beside == "cp"
                        else []
                    ),
                    "write `after_forward` to reshard to all of them, or `after_backward` to keep all parameters",
                ],
            )


class RootIsAUnit(Check):
    """A rule that makes no unit of `root`, which always is one.

    The parameters that no other unit holds need a unit.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit, root = none }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    ```
    """

    code = "LP327"
    slug = "root-is-a-unit"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        fsdp = analysis.plan.fsdp
        if fsdp is None or analysis.manifest is None:
            return
        rule = analysis.assigned(fsdp).by_path.get("")
        if rule is not None and isinstance(rule.treatment, NoUnit):
            yield self.at(
                analysis.rule_span(rule),
                "`root` is always a unit, since something must hold the parameters that no other unit holds",
                label="cannot be none",
                help=["delete this line"],
            )


class KeptUnderPipeline(Check):
    """A unit that is never resharded under a pipeline, which frees parameters at the end of every pass.

    A schedule reduces the gradients of a stage after its last micro batch and frees the unsharded parameters then,
    whatever the unit says.

    ## Example
    ```
    mesh (pp = 2, dp_shard = 16)
    pipeline on pp (schedule = 1F1B)
    fsdp on dp_shard { layers.* = unit(reshard = never), root = unit }
    ```

    ## Use instead
    ```
    mesh (pp = 2, dp_shard = 16)
    pipeline on pp (schedule = 1F1B)
    fsdp on dp_shard { layers.* = unit(reshard = after_backward), root = unit }
    ```
    """

    code = "LP326"
    slug = "kept-under-pipeline"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        fsdp, pipeline = analysis.plan.fsdp, analysis.plan.pipeline
        if fsdp is None or pipeline is None or not is_staged(analysis):
            return
        for rule in each_rule(fsdp):
            if isinstance(rule.treatment, Unit) and rule.treatment.reshard == "never":
                yield self.at(
                    analysis.span_of(rule.treatment, "reshard"),
                    "`reshard = never` has no effect under a pipeline",
                    label="freed all the same",
                    others=[Label(analysis.span_of(pipeline), "frees parameters at the end of every pass")],
                    help=["`after_backward` keeps them gathered for the whole pass"],
                )


class KeptForNothing(Check):
    """A unit that is never resharded, in a step of one micro batch.

    `never` keeps parameters gathered after backward for the next micro batch, and there is none: it saves no gather,
    and holds more memory than `after_backward`.

    ## Example
    ```
    batch (global = 32, micro = 1, seq_len = 8192)
    mesh  (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit(reshard = never), root = unit }
    ```

    ## Use instead
    ```
    batch (global = 32, micro = 1, seq_len = 8192)
    mesh  (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit(reshard = after_backward), root = unit }
    ```
    """

    code = "LP330"
    slug = "kept-for-nothing"
    severity = "warning"
    idle = True

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan = analysis.plan
        if plan.fsdp is None or is_staged(analysis) or micro_batches(plan) != 1:
            return
        for rule in each_rule(plan.fsdp):
            if isinstance(rule.treatment, Unit) and rule.treatment.reshard == "never":
                yield self.at(
                    analysis.span_of(rule.treatment, "reshard"),
                    "`reshard = never` saves no gather: a step has one micro batch",
                    label="holds memory for nothing",
                    others=[batch_label(analysis)],
                    help=["write `after_backward`"],
                    fix=replacement(rule.treatment, "reshard", "after_backward"),
                )


class LastUnitResharded(Check):
    """The unit that ends the forward pass is freed after it, to be gathered again at once for the backward pass.

    Its backward comes next, so freeing its parameters saves memory for the time of the loss only, and costs
    an all-gather. PyTorch keeps the root unit by default for this reason.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard {
      layers.* = unit
      output   = unit
      root     = unit
    }
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard {
      layers.* = unit
      output   = unit(reshard = after_backward)
      root     = unit
    }
    ```
    """

    code = "LP802"
    slug = "last-unit-resharded"
    severity = "advice"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        fsdp, manifest = analysis.plan.fsdp, analysis.manifest
        if fsdp is None or manifest is None or analysis.plan.mesh.pp > 1 or shard_ranks(analysis) == 1:
            return
        units = fsdp_units(analysis)
        for path in ("", last_module(manifest)):
            unit = units.get(path) if path is not None else None
            if unit is not None and unit.rule is not None and unit.is_resharded_after_forward:
                rule = unit.rule
                written_here = written(rule.treatment, "reshard")
                yield self.at(
                    analysis.span_of(rule.treatment, "reshard") if written_here else span_of(rule),
                    f"the unit `{path or 'root'}` ends the forward pass and begins the backward pass",
                    label="freed between the two" + ("" if written_here else ", by default"),
                    help=["write `unit(reshard = after_backward)`"],
                )


class ReshardUnderPipeline(Check):
    """Units that are freed after each forward pass under a pipeline, which gathers them once for each micro batch.

    This is ZeRO-3. A stage computes many micro batches in one step, and gathers for the backward pass of each; torch's
    schedules then keep the parameters for a forward pass that follows. With `reshard = after_backward` they are
    gathered once for all of them; the memory is that of one stage, which the pipeline has made small.

    ## Example
    ```
    mesh (pp = 4, dp_shard = 8)
    fsdp on dp_shard { layers.* = unit, root = unit }
    pipeline on pp (schedule = 1F1B)
    ```

    ## Use instead
    ```
    mesh (pp = 4, dp_shard = 8)
    fsdp on dp_shard { layers.* = unit(reshard = after_backward), root = unit }
    pipeline on pp (schedule = 1F1B)
    ```
    """

    code = "LP803"
    slug = "reshard-under-pipeline"
    severity = "advice"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        fsdp, pipeline, mesh = analysis.plan.fsdp, analysis.plan.pipeline, analysis.plan.mesh
        if fsdp is None or pipeline is None or mesh.pp == 1 or shard_ranks(analysis) == 1:
            return
        if splits_backward(analysis):
            return  # an error of its own
        for rule in each_rule(fsdp):
            if not isinstance(rule.treatment, Unit):
                continue
            unit = FsdpUnit(rule, resharding(rule.treatment, "" if rule.path == ROOT else rule.path))
            if unit.is_resharded_after_forward:
                how = "" if rule.treatment.reshard is not None else ", by default"
                yield self.at(
                    span_of(rule),
                    f"under a pipeline every micro batch gathers `{rule.path}` again",
                    label=f"freed after each forward pass{how}",
                    others=[Label(analysis.span_of(pipeline), "several micro batches in one step")],
                    help=["write `unit(reshard = after_backward)` where the memory allows it"],
                )
