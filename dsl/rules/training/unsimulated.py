"""`model`: rules about models that cannot be simulated."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.simulation import not_simulated
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.diagnostics.rule import Rule
from legoai.dsl.rules.base import Check
from legoai.specs.span import Span


class UnsimulatedModel(Check):
    """A model whose tensors have shapes that depend on the values of others, or with an `nn.SyncBatchNorm`.

    `legoai cost` runs the program on tensors that have shapes and no values. `torch.nonzero`, also of an index that is
    a mask, returns as many elements as are not zero, which is not known then; `torch.bincount`, `torch.unique` and
    `torch.masked_select` have such results too. The experts of `transformers` call it
    where `experts_implementation` is `eager`: each takes the tokens that are routed to it. An `nn.SyncBatchNorm` runs
    kernels and collectives of its own on several GPUs, which are not simulated.

    Such a plan can be lowered and run. It is not costed: `require` lines are not tested, and holes are not filled.
    `legoai cost`, `check`, `solve` and `graph` give LP718.
    """

    code = "LP717"
    slug = "unsimulated-model"
    severity = "warning"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        found = not_simulated(analysis)
        if found is None:
            return
        required = [Label(item.origin.written, "is not tested") for item in analysis.plan.require[:1]]
        yield self.at(
            place_of(analysis),
            f"the model {found.cause}: the plan can be lowered and run, and not costed",
            label="not simulated", others=required, help=found.help,
        )  # fmt: skip


class FiguresOfUnsimulatedModel(Rule):
    """A command that needs figures of a model that cannot be simulated.

    `legoai cost`, `check` and `solve`, pictures of a step or a pipeline by `legoai graph`, and `legoai.estimate` and
    `legoai.solve` simulate a step on tensors that have no values, as one of many ranks. The shapes of this model depend
    on values, or it has an `nn.SyncBatchNorm`.
    `legoai lint` does not give this error. It warns of such a plan by LP717, as it can be lowered and run.
    """

    code = "LP718"
    slug = "figures-of-unsimulated-model"


def place_of(analysis: Analysis) -> Span:
    """The span of the argument that chooses eager experts, or of the model."""
    model = analysis.plan.model
    return analysis.span_of(
        model, "experts_implementation" if "experts_implementation" in model.arguments else "target"
    )
