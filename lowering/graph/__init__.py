"""The step of a program as one graph, and the passes that rewrite it: the functions that graph-backend programs import.

Programs with a pipeline import :mod:`legoai.lowering.graph.step.stage` as well.
"""

from legoai.lowering.graph.contracts import rewritten
from legoai.lowering.graph.measurement.profile import MeasuredProfile
from legoai.lowering.graph.passes.activations import keep_activations
from legoai.lowering.graph.passes.bucket import bucket_units
from legoai.lowering.graph.passes.compile_regions import compile_regions
from legoai.lowering.graph.passes.deduplicate import deduplicate_unshards
from legoai.lowering.graph.passes.keep import keep_unsharded
from legoai.lowering.graph.passes.offload import offload_activations
from legoai.lowering.graph.passes.offload_state import offload_optimizer_state
from legoai.lowering.graph.passes.overlap import overlap_communication
from legoai.lowering.graph.passes.overlap_by_time import overlap_by_time
from legoai.lowering.graph.passes.prefetch import prefetch_proactively
from legoai.lowering.graph.passes.reshard import reshard_after_forward
from legoai.lowering.graph.passes.schedule_overlap import schedule_overlap
from legoai.lowering.graph.passes.unshard import unshard_selectively
from legoai.lowering.graph.step.regions import compile_module
from legoai.lowering.graph.step.sharding import shard_unit
from legoai.lowering.graph.step.step_graph import StepGraph
from legoai.lowering.graph.step.trace import trace_stage, trace_step

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
