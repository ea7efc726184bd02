"""Torch's own estimators of memory and time, private as yet, to which the benchmarks compare LegoAI's."""

from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.ilp_utils import aggregate_stats, parse_module_info
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.distributed._tools.sac_estimator import SACEstimator

__all__ = [
    "FSDPMemTracker",
    "MemTracker",
    "RuntimeEstimator",
    "SACEstimator",
    "aggregate_stats",
    "parse_module_info",
]
