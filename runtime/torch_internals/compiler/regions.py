"""Private names by which inductor compiles a graph of `aten` operators without autograd.

Inductor has no public parts. Imported only where a region of a step's graph is compiled: the import takes seconds.
Tried on torch 2.13.0.
"""

from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor import config, list_mode_options
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V

__all__ = [
    "V",
    "compile_fx_inner",
    "config",
    "fx_graph_cse",
    "joint_graph_passes",
    "list_mode_options",
    "select_decomp_table",
]
