"""End of the CUDA graphs that inductor has recorded.

NCCL counts the graphs that contain its collectives, and destroys a communicator only after them (2.26, its
`commDestroySync`): while compiled modules hold such graphs, `destroy_process_group` does not return.
"""

from __future__ import annotations

import sys

import torch

_TREES = "torch._inductor.cudagraph_trees"
"""Imported by inductor when it records the first graph."""


def drop_cuda_graphs() -> None:
    """Destroy all CUDA graphs of compiled modules, which are compiled again when they are called again.

    Where none was recorded, nothing is done or imported. A graph that still runs is destroyed when it ends.
    """
    trees = sys.modules.get(_TREES)
    if trees is not None:
        trees.reset_cudagraph_trees()
        torch.compiler.reset()  # its code would replay them
