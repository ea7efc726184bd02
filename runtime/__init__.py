"""Functions and classes that a lowered program calls while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from legoai.runtime.compiled import compile_with_hooks, overlap_tensor_parallel, wait_for_inputs, wait_for_output
    from legoai.runtime.errors import RunError, RunErrorCode
    from legoai.runtime.float8 import compute_float8_scales, convert_to_float8
    from legoai.runtime.last_layer import last_layer_cross_entropy
    from legoai.runtime.launching.options import RunOptions
    from legoai.runtime.launching.torchrun import launch
    from legoai.runtime.loss import (
        LossFunction,
        add_losses,
        chunked_cross_entropy,
        divided,
        local_value,
        matching_cross_entropy,
        token_cross_entropy,
    )
    from legoai.runtime.optimizer.clip import clip_gradients, reduce_partial_gradients
    from legoai.runtime.optimizer.combined import CombinedOptimizer
    from legoai.runtime.optimizer.muon import Muon
    from legoai.runtime.optimizer.parameter_groups import ParameterGroups
    from legoai.runtime.optimizer.schedule import warmup_schedule
    from legoai.runtime.optimizer.sharded import ShardedOptimizer
    from legoai.runtime.parallelism.pipeline import Pipeline, PipelineSchedule, RecomputingStage, ordered_schedule
    from legoai.runtime.parallelism.placeholders import is_held
    from legoai.runtime.parallelism.units import reshard_units
    from legoai.runtime.recomputation.budget import RecomputeWithin
    from legoai.runtime.recomputation.compiled import compile_within
    from legoai.runtime.recomputation.policies import keep_outputs
    from legoai.runtime.shared_modules import replace_everywhere
    from legoai.runtime.training.batches import Batch, Batches
    from legoai.runtime.training.loop import History
    from legoai.runtime.training.state import StepResult, Training
    from legoai.runtime.training.step import reduce_loss_and_norm
    from legoai.runtime.training.trainer import Trainer

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
    "compile_with_hooks",
    "compile_within",
    "compute_float8_scales",
    "convert_to_float8",
    "divided",
    "is_held",
    "keep_outputs",
    "last_layer_cross_entropy",
    "launch",
    "local_value",
    "matching_cross_entropy",
    "ordered_schedule",
    "overlap_tensor_parallel",
    "reduce_loss_and_norm",
    "reduce_partial_gradients",
    "replace_everywhere",
    "reshard_units",
    "token_cross_entropy",
    "wait_for_inputs",
    "wait_for_output",
    "warmup_schedule",
]

_HOMES = {
    "Batch": "training.batches",
    "Batches": "training.batches",
    "CombinedOptimizer": "optimizer.combined",
    "History": "training.loop",
    "LossFunction": "loss",
    "Muon": "optimizer.muon",
    "ParameterGroups": "optimizer.parameter_groups",
    "Pipeline": "parallelism.pipeline",
    "PipelineSchedule": "parallelism.pipeline",
    "RecomputeWithin": "recomputation.budget",
    "RecomputingStage": "parallelism.pipeline",
    "RunError": "errors",
    "RunErrorCode": "errors",
    "RunOptions": "launching.options",
    "ShardedOptimizer": "optimizer.sharded",
    "StepResult": "training.state",
    "Trainer": "training.trainer",
    "Training": "training.state",
    "add_losses": "loss",
    "chunked_cross_entropy": "loss",
    "clip_gradients": "optimizer.clip",
    "compile_with_hooks": "compiled",
    "compile_within": "recomputation.compiled",
    "compute_float8_scales": "float8",
    "convert_to_float8": "float8",
    "divided": "loss",
    "is_held": "parallelism.placeholders",
    "keep_outputs": "recomputation.policies",
    "last_layer_cross_entropy": "last_layer",
    "launch": "launching.torchrun",
    "local_value": "loss",
    "matching_cross_entropy": "loss",
    "ordered_schedule": "parallelism.pipeline",
    "overlap_tensor_parallel": "compiled",
    "reduce_loss_and_norm": "training.step",
    "reduce_partial_gradients": "optimizer.clip",
    "replace_everywhere": "shared_modules",
    "reshard_units": "parallelism.units",
    "token_cross_entropy": "loss",
    "wait_for_inputs": "compiled",
    "wait_for_output": "compiled",
    "warmup_schedule": "optimizer.schedule",
}


def __getattr__(name: str) -> Any:
    """Import names lazily: `launch` needs no torch, and `Trainer` takes seconds to import."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
