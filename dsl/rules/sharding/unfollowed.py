"""`shard`: the rule about a model whose forward cannot be followed."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis, is_open
from legoai.dsl.analysis.model import help_to_follow
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
