"""`pipeline`: rules about schedules that compute the gradients of weights apart from those of inputs."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.facts import decided, each_rule, replacement
from legoai.dsl.analysis.parallelism.fsdp import fsdp_units
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.stages.pipeline import splits_backward
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.specs.directives.checkpoint import Budget, Selective
from legoai.specs.directives.compile import AotEager, Inductor


class ReshardUnderSplitBackward(Check):
    """Units that free their parameters after forward, under a schedule that splits the backward pass.

    `InterleavedZeroBubble`, `ZBVZeroBubble` and `DualPipeV` compute the gradients of weights later than those
    of inputs. With FSDP2 units that reshard after forward, PyTorch 2.13 then trains with wrong gradients and
    reports no error. A unit other than `root` reshards after forward where its rule does not say otherwise.

    ## Example
    ```
    mesh (pp = 4, dp_shard = 8)
    fsdp on dp_shard { layers.* = unit }
    pipeline on pp (schedule = ZBVZeroBubble)
    ```

    ## Use instead
    ```
    mesh (pp = 4, dp_shard = 8)
    fsdp on dp_shard { layers.* = unit(reshard = after_backward) }
    pipeline on pp (schedule = ZBVZeroBubble)
    ```
    """

    code = "LP516"
    slug = "reshard-under-split-backward"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        pipeline, fsdp = analysis.plan.pipeline, analysis.plan.fsdp
        if pipeline is None or fsdp is None or fsdp.backend != "eager" or not splits_backward(analysis):
            return
        reported: set[int] = set()
        for unit in fsdp_units(analysis).values():
            rule = unit.rule
            if rule is None or id(rule) in reported or not unit.is_resharded_after_forward:
                continue
            reshard = rule.treatment.reshard
            reported.add(id(rule))
            schedule = pipeline.schedule if isinstance(pipeline.schedule, str) else "this order"
            yield self.at(
                rule.origin.written if reshard is None else analysis.span_of(rule.treatment, "reshard"),
                f"`{rule.path}` reshards after forward, which gives wrong gradients under `{schedule}`",
                label="reshards after forward by default" if reshard is None else "reshards after forward",
                others=[Label(analysis.span_of(pipeline, "schedule"), "computes weight gradients apart")],
                help=["write `unit(reshard = after_backward)`, or use `1F1B` or `Interleaved1F1B`"],
                fix=replacement(rule.treatment, "reshard", "after_backward"),
            )


class CompileUnderSplitBackward(Check):
    """Compiled modules under a schedule that splits the backward pass.

    A compiled backward is one graph: computing the gradients of inputs and weights separately runs it twice, which
    costs more than such a schedule saves. A graph compiled by inductor frees its saved tensors in the first run, and
    fails in the second. Under `backend = graph` each half is a graph of its own, and is compiled.

    ## Example
    ```
    mesh (pp = 4, dp_shard = 8)
    pipeline on pp (schedule = InterleavedZeroBubble)
    compile { layers.* = inductor }
    ```

    ## Use instead
    ```
    mesh (pp = 4, dp_shard = 8)
    pipeline on pp (schedule = Interleaved1F1B)
    compile { layers.* = inductor }
    ```
    """

    code = "LP517"
    slug = "compile-under-split-backward"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        pipeline, compiled = analysis.plan.pipeline, analysis.plan.compile
        if pipeline is None or compiled is None or is_traced(analysis) or not splits_backward(analysis):
            return
        decided(compiled)
        rule = next((item for item in compiled.rules if isinstance(item.treatment, Inductor | AotEager)), None)
        if rule is None:
            return
        schedule = pipeline.schedule if isinstance(pipeline.schedule, str) else "this order"
        yield self.at(
            rule.origin.written,
            f"`{schedule}` cannot take compiled modules: it computes the gradients of inputs and weights apart",
            label="compiled",
            others=[Label(analysis.span_of(pipeline, "schedule"), "splits the backward pass")],
            help=["use `1F1B`, `Interleaved1F1B` or `LoopedBFS`, or compile nothing"],
        )


class SelectiveUnderSplitBackward(Check):
    """Checkpointing by operator under a schedule that splits the backward pass.

    The outputs that `selective` and `budget` keep serve one backward. Computing the gradients of inputs and weights
    separately passes through a block twice, and PyTorch refuses the second time. Under `backend = graph` kept and
    recomputed values are passed from one half to the other.

    ## Example
    ```
    mesh (pp = 4, dp_shard = 8)
    pipeline on pp (schedule = ZBVZeroBubble)
    checkpoint { layers.* = selective([attention, matmul]) }
    ```

    ## Use instead
    ```
    mesh (pp = 4, dp_shard = 8)
    pipeline on pp (schedule = ZBVZeroBubble)
    checkpoint { layers.* = full }
    ```
    """

    code = "LP656"
    slug = "selective-under-split-backward"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        pipeline, checkpoint = analysis.plan.pipeline, analysis.plan.checkpoint
        if pipeline is None or checkpoint is None or is_traced(analysis) or not splits_backward(analysis):
            return
        chosen = [rule for rule in each_rule(checkpoint) if isinstance(rule.treatment, Selective | Budget)]
        for rule in {rule.origin.span: rule for rule in chosen}.values():
            yield self.at(
                rule.origin.written,
                f"`{rule.treatment.name}` cannot be combined with a schedule that goes backward through a block twice",
                label="keeps outputs for one backward",
                others=[
                    Label(analysis.span_of(pipeline, "schedule"), "computes the gradients of inputs and weights apart")
                ],
                help=["use `full` or `every(…)`, or a schedule such as `1F1B` or `Interleaved1F1B`"],
            )
