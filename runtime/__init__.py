"""Functions and classes that a lowered program calls while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from legoai.runtime.activation import keep_outputs
    from legoai.runtime.batches import Batch, Batches
    from legoai.runtime.combined_optimizer import CombinedOptimizer
    from legoai.runtime.compiled import overlap_tensor_parallel, wait_for_inputs, wait_for_output
    from legoai.runtime.errors import RunError, RunErrorCode
    from legoai.runtime.float8 import compute_float8_scales, convert_to_float8
    from legoai.runtime.loop import History
    from legoai.runtime.loss import (
        LossFunction,
        add_losses,
        chunked_cross_entropy,
        divided,
        local_value,
        matching_cross_entropy,
        token_cross_entropy,
    )
    from legoai.runtime.muon import Muon
    from legoai.runtime.optim import clip_gradients, reduce_partial_gradients, warmup_schedule
    from legoai.runtime.options import RunOptions
    from legoai.runtime.parameter_groups import ParameterGroups
    from legoai.runtime.pipeline import Pipeline, PipelineSchedule, RecomputingStage, ordered_schedule
    from legoai.runtime.placeholders import is_held
    from legoai.runtime.recompute_budget import RecomputeWithin
    from legoai.runtime.sharded_optimizer import ShardedOptimizer
    from legoai.runtime.step import reduce_loss_and_norm
    from legoai.runtime.torchrun import launch
    from legoai.runtime.trainer import Trainer
    from legoai.runtime.training import StepResult, Training
    from legoai.runtime.units import reshard_units

__all__ = [
    "Batch",
    "Batches",
    "CombinedOptimizer",
    "History",
    "LossFunction",
    "Muon",
    "ParameterGroups",
    "Pipeline",
    "PipelineSchedule",
    "RecomputeWithin",
    "RecomputingStage",
    "RunError",
    "RunErrorCode",
    "RunOptions",
    "ShardedOptimizer",
    "StepResult",
    "Trainer",
    "Training",
    "add_losses",
    "chunked_cross_entropy",
    "clip_gradients",
    "compute_float8_scales",
    "convert_to_float8",
    "divided",
    "is_held",
    "keep_outputs",
    "launch",
    "local_value",
    "matching_cross_entropy",
    "ordered_schedule",
    "overlap_tensor_parallel",
    "reduce_loss_and_norm",
    "reduce_partial_gradients",
    "reshard_units",
    "token_cross_entropy",
    "wait_for_inputs",
    "wait_for_output",
    "warmup_schedule",
]

_HOMES = {
    "Batch": "batches",
    "Batches": "batches",
    "CombinedOptimizer": "combined_optimizer",
    "History": "loop",
    "LossFunction": "loss",
    "Muon": "muon",
    "ParameterGroups": "parameter_groups",
    "Pipeline": "pipeline",
    "PipelineSchedule": "pipeline",
    "RecomputeWithin": "recompute_budget",
    "RecomputingStage": "pipeline",
    "RunError": "errors",
    "RunErrorCode": "errors",
    "RunOptions": "options",
    "ShardedOptimizer": "sharded_optimizer",
    "StepResult": "training",
    "Trainer": "trainer",
    "Training": "training",
    "add_losses": "loss",
    "chunked_cross_entropy": "loss",
    "clip_gradients": "optim",
    "compute_float8_scales": "float8",
    "convert_to_float8": "float8",
    "divided": "loss",
    "is_held": "placeholders",
    "keep_outputs": "activation",
    "launch": "torchrun",
    "local_value": "loss",
    "matching_cross_entropy": "loss",
    "ordered_schedule": "pipeline",
    "overlap_tensor_parallel": "compiled",
    "reduce_loss_and_norm": "step",
    "reduce_partial_gradients": "optim",
    "reshard_units": "units",
    "token_cross_entropy": "loss",
    "wait_for_inputs": "compiled",
    "wait_for_output": "compiled",
    "warmup_schedule": "optim",
}


def __getattr__(name: str) -> Any:
    """Import names lazily: `launch` needs no torch, and `Trainer` takes seconds to import."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
