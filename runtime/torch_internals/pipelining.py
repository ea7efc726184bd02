"""Private names of `torch.distributed.pipelining`.

The public schedules are written in terms of these: a plan's own order of actions, and the simulation of a rank, need
the actions themselves.
"""

# Whether stages agree on shapes before the first pass; a simulated rank has nobody to ask.
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import _Action as Action
from torch.distributed.pipelining.schedules import _ComputationType as ComputationType

# Runs any order of actions; the public classes each have an order of their own.
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as PipelineScheduleRuntime

__all__ = ["Action", "ComputationType", "InferenceMode", "PipelineScheduleRuntime"]
