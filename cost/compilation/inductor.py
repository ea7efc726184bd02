"""Inductor's schedule of a graph: its kernels, and the lifetime of each buffer.

Inductor itself is asked: its lowerings, its scheduler and the fusion rules of its backend run on the graph as they
would on a GPU (whose properties the catalogue states) or on a CPU, up to where code would be generated. Of its passes
over the graph those run that need no device: no-ops and pointless casts are removed, random numbers become its own, and
updates are made in place. Not run are the patterns that it would look for by example (a hand-written attention, a sum
of two matrix products, padding of matrices) and the choice between libraries and templates that it makes by measuring.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch._guards import TracingContext
from torch._inductor import config
from torch._inductor.codegen.cuda_combined_scheduling import CUDACombinedScheduling
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes import joint_graph
from torch._inductor.fx_passes.post_grad import post_grad_passes, remove_noop_ops, view_to_reshape
from torch._inductor.fx_passes.replace_random import replace_random_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.scheduler import Scheduler
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from legoai.cost.compilation.async_tp import as_with_nccl
from legoai.cost.compilation.schedule import Schedule
from legoai.cost.compilation.scheduler import Reader
from legoai.cost.replaced import replaced
from legoai.cost.simulated.device import Kind

_DEVICE: Final[dict[Kind, str]] = {"cuda": "cuda:0", "cpu": "cpu"}

_H100: Final = DeviceProperties(
    type="cuda",
    index=0,
    multi_processor_count=132,
    cc=90,
    major=9,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
)
"""NVIDIA H100 SXM (Hopper tuning guide, sections 1.4.1.1 and 1.4.1.2; 132 multiprocessors: H100 white paper, table 2).

Inductor splits long sums by them; A100 and B200 differ by less than a third in the number of multiprocessors.
"""


def prepare(graph: torch.fx.GraphModule, kind: Kind) -> None:
    """Run inductor's passes over the joint graph of forward and backward, as it does before it splits the two."""
    mode = _on_device(graph, kind)
    with V.set_fake_mode(mode), config.patch(pattern_matcher=False), _without_a_gpu():
        joint_graph.canonicalize_aten_ir_passes(graph)
        remove_noop_ops(graph.graph)
        for patterns in (joint_graph.early_patterns, *joint_graph.pass_patterns):
            patterns.apply(graph.graph)
        replace_random_passes(graph)
        graph.graph.lint()
        graph.recompile()


def schedule(graph: torch.fx.GraphModule, kind: Kind, *, is_backward: bool) -> Schedule:
    """Lower a graph of `aten` operators and schedule it.

    Args:
        graph: of forward or of backward; changed.
        kind: whose kernels are made.
        is_backward: whether what the graph takes may be overwritten where autograd needs it no more.

    Raises:
        SimulationError: inductor cannot lower the graph, or makes of it what has no record.
    """
    mode = _on_device(graph, kind)
    given = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(V.set_fake_mode(mode))
        stack.enter_context(config.patch(pattern_matcher=False, force_disable_caches=True))
        if kind == "cuda":
            stack.enter_context(_without_a_gpu())
            stack.enter_context(as_with_nccl())
        view_to_reshape(graph)  # type: ignore[no-untyped-call]
        post_grad_passes(graph, False)
        lowering = GraphLowering(graph, example_inputs=given, shape_env=None, is_backward=is_backward)
        stack.enter_context(V.set_graph_handler(lowering))
        stack.enter_context(V.set_debug_handler(DebugContext()))
        lowering.run(*given)
        lowering._update_scheduler()
        return Reader(lowering).read()


def _on_device(graph: torch.fx.GraphModule, kind: Kind) -> FakeTensorMode:
    """Say that the graph's tensors are on a device that inductor knows."""
    mode = TracingContext.get().fake_mode
    assert mode is not None
    device = torch.device(_DEVICE[kind])

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        with mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

    for node in graph.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(moved, node.meta["val"])
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": device}
    return mode


@contextlib.contextmanager
def _without_a_gpu() -> Iterator[None]:
    """Let inductor find the properties of a GPU, and its backend, where PyTorch is built without CUDA."""

    def copy(target: torch.Tensor, source: torch.Tensor, *_: Any) -> torch.Tensor:
        source.expand(target.shape)  # all that the passes want to know is whether this is possible
        return target

    def invert(tensor: torch.Tensor) -> torch.Tensor:
        inverted: torch.Tensor = torch.ops.aten.bitwise_not.default(tensor)
        return inverted

    with (
        replaced(torch.Tensor, "copy_", copy),
        replaced(torch.Tensor, "__invert__", invert),
        replaced(Scheduler, "create_backend", lambda scheduler, _: CUDACombinedScheduling(scheduler)),
        replaced(DeviceProperties, "create", staticmethod(lambda _: _H100)),
    ):
        yield
