"""What a lowered program calls while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from legoai.runtime.activation import keep_outputs
    from legoai.runtime.compiled import overlap_tensor_parallel, wait_for_inputs, wait_for_output
    from legoai.runtime.errors import RunError, RunErrorCode
    from legoai.runtime.float8 import convert_to_float8
    from legoai.runtime.loop import History
    from legoai.runtime.loss import LossFunction
    from legoai.runtime.optim import warmup_schedule
    from legoai.runtime.options import RunOptions
    from legoai.runtime.pipeline import Pipeline, PipelineSchedule, ordered_schedule
    from legoai.runtime.recompute_budget import RecomputeWithin
    from legoai.runtime.sharded_optimizer import ShardedOptimizer
    from legoai.runtime.stand_ins import is_held
    from legoai.runtime.step import Training
    from legoai.runtime.torchrun import launch
    from legoai.runtime.trainer import Trainer

__all__ = [
    "History",
    "LossFunction",
    "Pipeline",
    "PipelineSchedule",
    "RecomputeWithin",
    "RunError",
    "RunErrorCode",
    "RunOptions",
    "ShardedOptimizer",
    "Trainer",
    "Training",
    "convert_to_float8",
    "is_held",
    "keep_outputs",
    "launch",
    "ordered_schedule",
    "overlap_tensor_parallel",
    "wait_for_inputs",
    "wait_for_output",
    "warmup_schedule",
]

_HOMES = {
    "History": "loop",
    "LossFunction": "loss",
    "Pipeline": "pipeline",
    "PipelineSchedule": "pipeline",
    "RecomputeWithin": "recompute_budget",
    "RunError": "errors",
    "RunErrorCode": "errors",
    "RunOptions": "options",
    "ShardedOptimizer": "sharded_optimizer",
    "Trainer": "trainer",
    "Training": "step",
    "convert_to_float8": "float8",
    "is_held": "stand_ins",
    "keep_outputs": "activation",
    "launch": "torchrun",
    "ordered_schedule": "pipeline",
    "overlap_tensor_parallel": "compiled",
    "wait_for_inputs": "compiled",
    "wait_for_output": "compiled",
    "warmup_schedule": "optim",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: `launch` needs no torch, and `Trainer` takes seconds to import."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
