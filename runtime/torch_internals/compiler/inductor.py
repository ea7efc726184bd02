"""Private names of inductor, whose passes, lowerings and scheduler decide the kernels of a compiled module.

Inductor has no public parts. Imported only where a module is compiled with it: the import takes seconds.
"""

from torch._inductor import config, ir
from torch._inductor.codegen.cuda_combined_scheduling import CUDACombinedScheduling
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.dependencies import MemoryDep

# The passes over a graph that need no device.
from torch._inductor.fx_passes import joint_graph
from torch._inductor.fx_passes.post_grad import post_grad_passes, remove_noop_ops, view_to_reshape
from torch._inductor.fx_passes.replace_random import replace_random_passes
from torch._inductor.graph import GraphLowering

# Inductor's description of a GPU.
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.scheduler import BaseSchedulerNode, NopKernelSchedulerNode, Scheduler, SchedulerNode

# The fake mode, graph and debug handler of the lowering that runs.
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

__all__ = [
    "BaseSchedulerNode", "CUDACombinedScheduling", "DebugContext", "DeviceProperties", "GraphLowering", "MemoryDep",
    "NopKernelSchedulerNode", "OrderedSet", "Scheduler", "SchedulerNode", "V", "config", "ir", "joint_graph",
    "post_grad_passes", "remove_noop_ops", "replace_random_passes", "select_decomp_table", "view_to_reshape",
]  # fmt: skip
