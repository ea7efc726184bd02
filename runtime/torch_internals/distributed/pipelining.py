"""Private names of `torch.distributed.pipelining`.

The public schedules are written in terms of these: a plan's own order of actions, and the simulation of a rank, need
the actions themselves.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining import schedules

# Whether stages agree on shapes before the first pass; a simulated rank has no peers.
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import _Action as Action
from torch.distributed.pipelining.schedules import _ComputationType as ComputationType

# Runs any order of actions; the public classes each have an order of their own.
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as PipelineScheduleRuntime

__all__ = ["Action", "ComputationType", "InferenceMode", "PipelineScheduleRuntime", "computing_schedule"]


def computing_schedule(name: str) -> Any:
    """Return the class of a schedule of several stages that lists the compute actions of ranks, and cannot be run.

    torch's own also inserts sends, receives and all-gathers, in time quadratic in the number of actions.
    """
    left_out = {"_prepare_schedule_with_comms": lambda *_: None}
    return type(name, (getattr(schedules, f"Schedule{name}"),), left_out)
