"""Loss on data that are not trained on."""

from __future__ import annotations

import contextlib

import torch

from legoai.runtime.data.samples import Stream
from legoai.runtime.device import Device
from legoai.runtime.float8 import compute_float8_scales
from legoai.runtime.launching.signals import StopRequest
from legoai.runtime.loss import add_losses, local_value, loss_context
from legoai.runtime.parallelism.units import reshard_units
from legoai.runtime.process_group import sum_over_world
from legoai.runtime.training.batches import Batch, Batches
from legoai.runtime.training.recipe import Recipe
from legoai.runtime.training.state import Training


@torch.no_grad()
def validation_loss(
    recipe: Recipe, training: Training, stream: Stream, *, batches: int, device: Device, stop: StopRequest
) -> float | None:
    """Return the mean loss over so many micro batches of each rank, in nats; None where a signal ended it early.

    With a pipeline the micro batches are those of full passes.
    """
    compute_float8_scales(training.parts)  # those of the step are of the weights before its update
    modes = [(module, module.training) for part in training.parts for module in part.modules()]
    for part in training.parts:
        part.eval()
    found = _sum_of_losses(recipe, training, stream, batches, device, stop)
    for module, mode in modes:  # a model may be trained with modules in evaluation mode
        module.training = mode
    for part in training.parts:
        reshard_units(part)  # no backward does it for units that stay unsharded after forward
    if found is None:
        return None
    total, count = found
    values = torch.stack([total / count, torch.ones_like(total)])
    summed, ranks = sum_over_world(values if training.counts_loss else torch.zeros_like(values))
    return summed / ranks


def passes(training: Training, unread: Stream, *, batches: int) -> float:
    """Return how often a validation of so many micro batches reads its data, whose stream is used up for that."""
    unread.skip(_rounded(training, batches))
    return unread.epoch


def _rounded(training: Training, batches: int) -> int:
    together = 1 if training.staged is None else training.staged.microbatches
    return -(-batches // together) * together


def _sum_of_losses(  # noqa: PLR0917
    recipe: Recipe, training: Training, stream: Stream, count: int, device: Device, stop: StopRequest
) -> tuple[torch.Tensor, int] | None:
    """Return the sum of the micro batches' losses, and their number; None after a signal, on all ranks at once."""
    total = torch.zeros((), dtype=torch.float64, device=device.torch_device)
    together = 1 if training.staged is None else training.staged.microbatches
    count = _rounded(training, count)
    for batch in Batches(training, stream).take(count, together=together):
        with loss_context(parallel=recipe.loss_parallel):
            if training.staged is None:
                total += local_value(_loss(recipe, training, batch, device))
            else:
                losses = training.staged.evaluate_pass(batch.inputs, batch.targets)
                add_losses(total, losses, scale=training.accumulation)
        asked, *_ = sum_over_world(torch.full((1,), float(stop.signal is not None), device=total.device))
        if asked:
            return None
    return total, count


def _loss(recipe: Recipe, training: Training, batch: Batch, device: Device) -> torch.Tensor:
    """The loss of one micro batch on the whole model."""
    arguments = {} if training.positions is None else {"positions": batch.positions}
    casts: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if recipe.autocast_dtype is not None:
        casts = torch.autocast(device.type, dtype=recipe.autocast_dtype)
    assert batch.targets is not None, "this rank has the whole model"
    with casts:
        return training.loss(training.model(*batch.inputs, **arguments), batch.targets)
