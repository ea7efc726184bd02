"""One optimizer step of a lowered program, and the agreement of all ranks on its loss and gradient norm."""

from __future__ import annotations

import math

import torch

from legoai.runtime.initialize import seed_of
from legoai.runtime.optimizer.clip import squared_norm_share
from legoai.runtime.process_group import sum_over_world
from legoai.runtime.training.batches import Batches
from legoai.runtime.training.recipe import Recipe
from legoai.runtime.training.state import StepResult, Training
from legoai.specs.models.random_operators import seed_generators


def take_step(recipe: Recipe, training: Training, batches: Batches, *, step: int) -> StepResult:
    """Seed the random numbers of a step, and take it.

    Args:
        recipe: of the program.
        training: changed by the step.
        batches: of the step.
        step: counted from 0; it determines the random numbers, and the number of samples.
    """
    batches.step = step
    seed_generators(seed_of(training.seed, f"step {step} {training.random_stream}"), training.device)
    return recipe.train_step(training, batches)


def reduce_loss_and_norm(training: Training, loss: torch.Tensor) -> StepResult:
    """Return the mean loss of all ranks and the norm of the whole gradient.

    One all-reduce, and the only wait for the device in a step; with it ranks agree on whether to stop.

    Args:
        training: with complete gradients.
        loss: the mean loss of this rank's samples in the step, a scalar.
    """
    square = squared_norm_share(training.optimizer.param_groups, holders=training.holders)
    values = torch.zeros(4, dtype=torch.float64, device=training.device)
    if training.counts_loss:
        values[0] = loss
        values[1] = 1.0
    values[2] = square
    if training.control.asked_to_stop():
        values[3] = 1.0
    total, count, squared_norm, stops = sum_over_world(values)
    norm = math.sqrt(squared_norm) if squared_norm >= 0 else math.nan
    return StepResult(loss=total / count, norm=norm, stops=stops > 0)
