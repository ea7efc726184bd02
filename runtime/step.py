"""What does one rank do in one optimizer step?"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from legoai.runtime.context import local_positions
from legoai.runtime.data import MicroBatch
from legoai.runtime.device import Device
from legoai.runtime.initialize import seed_of
from legoai.runtime.loss import local_value, loss_context
from legoai.runtime.optim import (
    clip_gradients,
    reduce_partial_gradients,
    set_schedule_step,
    squared_norm_share,
)
from legoai.runtime.process_group import sum_over_world
from legoai.runtime.units import reshard_units, set_gradient_reduction, units_of

if TYPE_CHECKING:
    from legoai.runtime.pipeline import StagedModel
    from legoai.runtime.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The objects that a training changes.

    Attributes:
        model: parallelized and initialised; of a pipeline, what this rank holds, under the names of the whole model.
        staged: the stages of this rank and their schedule, or None without a pipeline.
        digest: of the whole model; see `model_digest`.
        mesh: of all ranks.
        optimizer: over the groups of `parameter_groups`.
        scheduler: of the learning rate, or None.
        degree: ranks that read different samples.
        accumulation: micro batches of one rank in one optimizer step.
        seed: of the run.
    """

    model: nn.Module
    mesh: DeviceMesh
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR | None
    degree: int
    accumulation: int
    seed: int
    digest: str
    staged: StagedModel | None = None

    @property
    def parts(self) -> list[nn.Module]:
        """The modules that are called: the model, or the stages of this rank."""
        return [self.model] if self.staged is None else self.staged.modules


class Batches(Protocol):
    """Where micro batches come from."""

    def next(self) -> MicroBatch:
        """Return this rank's next micro batch."""

    def skip(self, batches: int) -> None:
        """Pass over micro batches without reading them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """What all ranks know when the gradients of a step are complete.

    Attributes:
        loss: mean over the step's samples.
        norm: 2-norm of the whole gradient; NaN if a part is not finite.
        stops: whether some rank was asked to stop.
        data_seconds: spent on waiting for data.
    """

    loss: float
    norm: float
    stops: bool
    data_seconds: float

    @property
    def finite(self) -> bool:
        """Whether the update can be made."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class OptimizerStep:
    """The steps of one rank: `gradient` and then `update`, each time.

    Args:
        trainer: what the program says.
        training: what the steps change.
        device: of this rank.
        observe: called with complete gradients, before they are clipped.
    """

    def __init__(
        self,
        trainer: Trainer,
        training: Training,
        device: Device,
        *,
        observe: Callable[[Training], None] | None = None,
    ) -> None:
        self.trainer = trainer
        self.training = training
        self.device = device
        self.observe = observe
        self.loss = trainer.loss_function()
        self.units = units_of(training.parts)
        self.autocast: contextlib.AbstractContextManager[Any] = (
            contextlib.nullcontext()
            if trainer.autocast_dtype is None
            else torch.autocast(device.type, dtype=trainer.autocast_dtype)
        )
        token_axes = (*trainer.data_axes, *(() if trainer.context_axis is None else (trainer.context_axis,)))
        token_rank = rank_along(training.mesh, token_axes)
        self.counts_loss = _is_first_elsewhere(training.mesh, (*token_axes, "pp"))
        self.holders = dist.get_world_size()
        self.random_stream = f"data rank {token_rank}"
        if training.staged is not None:
            self.counts_loss = self.counts_loss and training.staged.holds_last
            self.holders //= training.mesh["pp"].size()
            self.random_stream += f" stage rank {training.mesh.get_local_rank('pp')}"
        self.positions = self._positions()
        if training.staged is not None and self.positions is not None:
            training.staged.give_all(positions=self.positions.to(device.torch_device))

    def gradient(self, step: int, batches: Batches, *, stop: bool) -> Gradient:
        """Run forward and backward of all micro batches of a step, and hear what the other ranks have.

        Args:
            step: counted from 0; it decides what is random.
            batches: of this rank.
            stop: whether this rank was asked to stop.
        """
        groups = self.training.optimizer.param_groups
        torch.manual_seed(seed_of(self.training.seed, f"step {step} {self.random_stream}"))
        loss, data_seconds = self._forward_backward(batches)
        reduce_partial_gradients(groups)
        square = squared_norm_share(groups, holders=self.holders)
        mean_loss, norm, stops = self._agree(loss, square, stop)
        reshard_units(self.units)
        return Gradient(loss=mean_loss, norm=norm, stops=stops, data_seconds=data_seconds)

    def update(self, gradient: Gradient, *, step: int) -> None:
        """Clip the gradients and update the parameters, unless the gradient is not finite; then forget the gradients.

        Args:
            gradient: of the step.
            step: counted from 0; the learning rate becomes that of the next.
        """
        groups = self.training.optimizer.param_groups
        if self.observe is not None:
            self.observe(self.training)
        if gradient.finite:
            if self.trainer.clip_norm is not None:
                clip_gradients(groups, max_norm=self.trainer.clip_norm, total_norm=gradient.norm)
            self.training.optimizer.step()
        self.training.optimizer.zero_grad()
        if self.training.scheduler is not None:
            set_schedule_step(self.training.scheduler, step + 1)

    def _forward_backward(self, batches: Batches) -> tuple[torch.Tensor, float]:
        """Run the micro batches of one step; return their mean loss and the seconds spent waiting for data."""
        total = torch.zeros((), dtype=torch.float64, device=self.device.torch_device)
        waited = 0.0
        staged = self.training.staged
        if staged is not None:
            for _ in range(self.training.accumulation // staged.microbatches):
                asked = time.perf_counter()
                batch = self.next_pass(staged, batches)
                waited += time.perf_counter() - asked
                with loss_context(parallel=self.trainer.loss_parallel):
                    for loss in staged.train_pass(*batch):
                        total += local_value(loss)
            return total / self.training.accumulation, waited
        for index in range(self.training.accumulation):
            if self.trainer.reduce_gradients == "last_micro_batch":
                set_gradient_reduction(self.training.model, reduce=index == self.training.accumulation - 1)
            asked = time.perf_counter()
            inputs, targets = self.next_batch(batches)
            waited += time.perf_counter() - asked
            with loss_context(parallel=self.trainer.loss_parallel):
                with self.autocast:
                    loss = self.loss(self.outputs(inputs), targets)
                (loss / self.training.accumulation).backward()  # type: ignore[no-untyped-call]
            total += local_value(loss)
        return total / self.training.accumulation, waited

    def _agree(self, loss: torch.Tensor, squared_norm_share: torch.Tensor, stop: bool) -> tuple[float, float, bool]:
        """Return the mean loss over the data axes and the gradient norm, and hear whether any rank is to stop.

        One all-reduce, and the only wait for the device in a step. Of ranks that hold the same samples only
        one counts.
        """
        values = torch.zeros(4, dtype=torch.float64, device=self.device.torch_device)
        if self.counts_loss:
            values[0] = loss
            values[1] = 1.0
        values[2] = squared_norm_share
        if stop:
            values[3] = 1.0
        total, count, square, stops = sum_over_world(values)
        return total / count, math.sqrt(square) if square >= 0 else math.nan, stops > 0

    def next_pass(self, staged: StagedModel, batches: Batches) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Return the micro batches of one pass behind each other; ranks in the middle read none, and only count."""
        if not (staged.holds_first or staged.holds_last):
            batches.skip(staged.microbatches)
            return None, None
        pairs = [self.next_batch(batches) for _ in range(staged.microbatches)]
        return torch.cat([tokens for (tokens,), _ in pairs]), torch.cat([targets for _, targets in pairs])

    def next_batch(self, batches: Batches) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return inputs and targets of this rank: its samples, and of these its part of the sequence."""
        batch, device = batches.next(), self.device.torch_device
        inputs, targets = batch.inputs, batch.targets
        if self.positions is not None:
            inputs, targets = tuple(item[:, self.positions] for item in inputs), targets[:, self.positions]
        return tuple(item.to(device, non_blocking=True) for item in inputs), targets.to(device, non_blocking=True)

    def _positions(self) -> torch.Tensor | None:
        """Return the places in their sequence of the tokens that this rank reads; None where it reads them all."""
        axis, mesh = self.trainer.context_axis, self.training.mesh
        if axis is None:
            return None
        return local_positions(
            rank=mesh.get_local_rank(axis),
            size=mesh[axis].size(),
            length=self.trainer.seq_len,
            balance=self.trainer.context_balance,
        )

    def outputs(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Run the model on the samples of this rank."""
        model = self.training.model
        if self.positions is None:
            return model(*inputs)  # type: ignore[no-any-return]
        return model(*inputs, positions=self.positions.to(inputs[0].device))  # type: ignore[no-any-return]


def rank_along(mesh: DeviceMesh, axes: tuple[str, ...]) -> int:
    """Return this rank's place among the ranks of these axes, the first axis outermost."""
    place = 0
    for axis in axes:
        place = place * mesh[axis].size() + mesh.get_local_rank(axis)
    return place


def _is_first_elsewhere(mesh: DeviceMesh, axes: tuple[str, ...]) -> bool:
    """Return whether this rank stands for those with the same samples: it is first on every other axis."""
    return all(mesh.get_local_rank(axis) == 0 for axis in mesh.mesh_dim_names or () if axis not in axes)
