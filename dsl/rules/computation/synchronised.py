"""Rule about normalisation by the samples of all ranks."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.model import synchronised_norms
from legoai.dsl.analysis.stages.pipeline import is_staged
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check


class SynchronisedNorm(Check):
    """A model with an `nn.SyncBatchNorm` that is trained on CPUs, or in a pipeline.

    It exchanges the statistics of its samples with all ranks. PyTorch does that on GPUs alone, and refuses tensors of a
    CPU in a process of a run, even if there is one. The ranks of other stages of a pipeline have other layers, and no
    statistics to exchange.
    """

    code = "LP649"
    slug = "synchronised-norm"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan, norms = analysis.plan, synchronised_norms(analysis)
        if not norms:
            return
        if analysis.device_kind == "cpu":
            what, other = "which PyTorch does on GPUs alone", Label(analysis.span_of(plan.cluster), "no GPUs")
        elif plan.pipeline is not None and is_staged(analysis):
            what, other = "also of other stages", Label(analysis.span_of(plan.pipeline), "has stages")
        else:
            return
        yield self.at(
            analysis.span_of(plan.model, "target"),
            f"`{norms[0]}` of class `SyncBatchNorm` normalises by the samples of all ranks, {what}",
            label="a training would fail in its first forward" if analysis.device_kind == "cpu" else "waits for others",
            others=[other],
            help=["take a normalisation of each rank's samples, as `nn.GroupNorm` and `nn.BatchNorm2d` are"],
        )
