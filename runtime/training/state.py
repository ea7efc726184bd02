"""The objects that a training changes, and the result of one of its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from legoai.runtime.data.sequences import MicroBatch
from legoai.runtime.loss import LossFunction
from legoai.runtime.published.whole_model import WholeModel

if TYPE_CHECKING:
    from legoai.runtime.parallelism.pipeline import PipelineSchedule, StagedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The loss and the norm of the gradient of one optimizer step, equal on all ranks.

    Attributes:
        loss: mean over the step's samples.
        norm: 2-norm of the whole gradient, before clipping; NaN if a part is not finite.
        stops: whether some rank was asked to stop after this step.
    """

    loss: float
    norm: float
    stops: bool

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


@dataclass(slots=True, kw_only=True)
class StepControl:
    """Requests of a run for each step.

    Attributes:
        asked_to_stop: whether this rank was asked to stop.
        on_gradients: called on every rank with the result of each step, when the gradients are complete and before they
            are clipped; one that raises ends the run without the update.
        on_samples: called with every micro batch that this rank reads, whole.
    """

    asked_to_stop: Callable[[], bool] = lambda: False
    on_gradients: list[Callable[[StepResult], None]] = field(default_factory=list)
    on_samples: list[Callable[[MicroBatch], None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A message for the user, shown once.

    Attributes:
        lines: for the terminal.
        event: its name in the metrics.
        values: of the event.
    """

    lines: tuple[str, ...]
    event: str
    values: dict[str, Any]


class StepFunction(Protocol):
    """Forward, loss and backward of a micro batch in one."""

    def __call__(
        self,
        inputs: Sequence[torch.Tensor],
        targets: torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        is_last: bool = True,
    ) -> torch.Tensor:
        """Return the loss, and add the gradients to those of the parameters."""

    def reshard(self) -> None:
        """Free the parameters that stay gathered from micro batch to micro batch."""

    def take_notices(self) -> list[Notice]:
        """Return the pending notices, once."""

    def end_step(self) -> list[Notice]:
        """Note the end of an optimizer step, on every rank, and return pending notices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The objects that a training changes, on one rank.

    Attributes:
        model: parallelized and initialised; for a pipeline, the modules of this rank, with the names of the full model.
        staged: the stages of this rank and their schedule, or None without a pipeline.
        digest: of the whole model; see `model_digest`.
        whole: description of the full model, into which published weights are loaded.
        mesh: of all ranks.
        device: on which this rank computes.
        optimizer: over groups of parameters.
        scheduler: of the learning rate, or None.
        loss: of one micro batch.
        graph: forward, loss and backward of one micro batch, or None where the model is called.
        positions: of the tokens that this rank reads in their sequence, int64 [tokens]; None where it reads them all.
        degree: ranks that read different samples.
        accumulation: micro batches of one rank in one optimizer step; of the full batch where it grows.
        holders: ranks among which each parameter is sharded or replicated.
        counts_loss: whether the loss of this rank counts: only one of the ranks that read the same samples does.
        seed: of the run.
        random_stream: names this rank's random numbers; ranks that read the same tokens for the same stages share it.
        control: requests of the run for each step.
    """

    model: nn.Module
    mesh: DeviceMesh
    device: torch.device
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR | None
    loss: LossFunction
    graph: StepFunction | None = None
    positions: torch.Tensor | None = None
    degree: int
    accumulation: int
    holders: int
    counts_loss: bool
    seed: int
    random_stream: str
    digest: str
    whole: WholeModel
    staged: StagedModel | None = None
    control: StepControl = field(default_factory=StepControl)

    @property
    def parts(self) -> list[nn.Module]:
        """The modules that are called: the model, or the stages of this rank."""
        return [self.model] if self.staged is None else self.staged.modules

    @property
    def schedule(self) -> PipelineSchedule:
        """The schedule of the pipeline."""
        assert self.staged is not None, "a training with a pipeline"
        return self.staged.schedule

    @property
    def step_graph(self) -> StepFunction:
        """Forward, loss and backward of one micro batch."""
        assert self.graph is not None, "a training whose step is traced"
        return self.graph

    def may_update(self, result: StepResult) -> bool:
        """Report the result of a step; return whether to make its update: not if the gradient is not finite.

        Raises:
            RunError: loss or gradient is not finite, and the run is to stop then.
        """
        for report in self.control.on_gradients:
            report(result)
        return result.finite
