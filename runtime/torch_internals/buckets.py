"""Inductor's functions that merge collectives of a graph into one with a flat buffer.

Tried on torch 2.13.0. Importing them registers the operators that fill the buffer, and takes seconds, since it imports
inductor: only what merges imports this module, when it does.

Inductor's `manual_overlap_bucketing` merges collectives and moves them at once; it knows forward and backward graphs
apart, not one graph of both, and on a machine without triton it fails. Here are the functions by which it merges.
"""

from torch._inductor.fx_passes.bucketing import merge_all_gather_bucket, merge_reduce_scatter_bucket

__all__ = ["merge_all_gather_bucket", "merge_reduce_scatter_bucket"]
