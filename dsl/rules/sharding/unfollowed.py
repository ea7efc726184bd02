"""Rules about a model whose forward cannot be followed, under `shard` and among ranks with other samples."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis, is_open
from legoai.dsl.analysis.model import help_to_follow, reads_values
from legoai.dsl.analysis.parallelism.mesh import replicating_axes, sharded_axes
from legoai.dsl.analysis.parallelism.replicate import replica_axes
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check


class LayoutsNotChecked(Check):
    """Tensor parallelism for a model whose forward cannot be followed.

    The layouts from module to module are checked by the model's forward, which is run on the meta device, where tensors
    have no values: `if x.isnan().any()` and `counts.tolist()` fail there. Then a style that gets another layout than it
    expects is not found before the run. `docs/factories.md` says what the forward of a factory's model may do.
    """

    code = "LP441"
    slug = "layouts-not-checked"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest, plan = analysis.manifest, analysis.plan
        shard, size = plan.shard_on("tp"), plan.mesh.size("tp")
        if manifest is None or manifest.flow_error is None or shard is None or not shard.rules:
            return
        if not is_open(size) and size == 1:
            return
        yield self.at(
            analysis.span_of(shard),
            f"the model could not be followed, so layouts on `tp` are not checked: {manifest.flow_error}",
            label="a wrong layout is not found before the run",
            others=[Label(analysis.span_of(plan.model, "target"), "this model")],
            help=help_to_follow(analysis),
        )


class DecisionsOfRanks(Check):
    """A forward that reads values of tensors, under `fsdp` or `replicate` on several ranks.

    It may decide by them what it calls: `if self.training and torch.rand([]) < 0.5: return x` skips a block at random.
    Ranks have other samples and other random numbers. Where one rank skips a unit, or leaves a parameter without a
    gradient, and another does not, their collectives do not match, and the run hangs or fails.
    """

    code = "LP336"
    slug = "decisions-of-ranks"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan, mesh = analysis.plan, analysis.plan.mesh
        if not reads_values(analysis):
            return
        assert analysis.manifest is not None
        axes = (*sharded_axes(analysis), *replicating_axes(analysis), *replica_axes(analysis))
        several = next((axis for axis in axes if mesh.size(axis) > 1), None)
        if several is None:
            return
        yield self.at(
            analysis.span_of(plan.model, "target"),
            "forward reads values of tensors, and every rank must call the same modules, whatever they are: "
            f"{analysis.manifest.flow_error}",
            label="may decide by values what it calls",
            others=[Label(analysis.span_of(mesh, several), f"{mesh.size(several)} ranks")],
            help=["decide by what is equal on all ranks, such as shapes or the number of the step"],
        )
