"""The step of a program as one graph, and the passes that rewrite it: the functions that graph-backend programs import.

Programs with a pipeline import :mod:`legoai.lowering.graph.stage` as well.
"""

from legoai.lowering.graph.activations import keep_activations
from legoai.lowering.graph.bucket import bucket_units
from legoai.lowering.graph.compile_regions import compile_regions
from legoai.lowering.graph.deduplicate import deduplicate_unshards
from legoai.lowering.graph.keep import keep_unsharded
from legoai.lowering.graph.measured_profile import MeasuredProfile
from legoai.lowering.graph.offload import offload_activations
from legoai.lowering.graph.offload_state import offload_optimizer_state
from legoai.lowering.graph.overlap import overlap_communication
from legoai.lowering.graph.overlap_by_time import overlap_by_time
from legoai.lowering.graph.passes import rewritten
from legoai.lowering.graph.prefetch import prefetch_proactively
from legoai.lowering.graph.regions import compile_module
from legoai.lowering.graph.reshard import reshard_after_forward
from legoai.lowering.graph.schedule_overlap import schedule_overlap
from legoai.lowering.graph.sharding import shard_unit
from legoai.lowering.graph.step_graph import StepGraph
from legoai.lowering.graph.trace import trace_stage, trace_step
from legoai.lowering.graph.unshard import unshard_selectively

__all__ = [
    "MeasuredProfile",
    "StepGraph",
    "bucket_units",
    "compile_module",
    "compile_regions",
    "deduplicate_unshards",
    "keep_activations",
    "keep_unsharded",
    "offload_activations",
    "offload_optimizer_state",
    "overlap_by_time",
    "overlap_communication",
    "prefetch_proactively",
    "reshard_after_forward",
    "rewritten",
    "schedule_overlap",
    "shard_unit",
    "trace_stage",
    "trace_step",
    "unshard_selectively",
]
