"""Inductor's schedule of a graph: its kernels, and the lifetime of each buffer.

Inductor's own lowerings, scheduler and fusion rules of its backend run on the graph as they would on the plan's GPU
(whose properties the catalogue states) or on a CPU, up to code generation. Of its graph passes, those run that need no
device: no-ops and pointless casts are removed, random numbers are replaced by inductor's, and updates are made in
place. Matrices are padded without the measurement that inductor decides by. Two things do not run: pattern matching by
example (a hand-written attention, a sum of two matrix products), and the choice between libraries and templates by
measurement.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, Final

import torch

from legoai.cost.compilation.async_tp import as_with_nccl
from legoai.cost.compilation.gpu import properties_of
from legoai.cost.compilation.inductor_kernels import Reader
from legoai.cost.compilation.padding import pad_products
from legoai.cost.compilation.schedule import Schedule
from legoai.cost.simulated.device import Kind
from legoai.cost.simulated.operators.grouped_products import has_grouped_kernel
from legoai.runtime.torch_internals.compiler.graphs import TracingContext
from legoai.runtime.torch_internals.compiler.inductor import (
    CUDACombinedScheduling,
    DebugContext,
    GraphLowering,
    V,
    config,
    joint_graph,
    post_grad_passes,
    remove_noop_ops,
    replace_random_passes,
    view_to_reshape,
)
from legoai.runtime.torch_internals.fake_tensors import FakeTensorMode
from legoai.runtime.torch_internals.operators import tree_map
from legoai.runtime.torch_internals.patching import patched
from legoai.specs.cluster import Device

_DEVICE: Final[dict[Kind, str]] = {"cuda": "cuda:0", "cpu": "cpu"}


def prepare(graph: torch.fx.GraphModule, kind: Kind, gpu: Device | None) -> None:
    """Run inductor's passes over the joint graph of forward and backward, as it does before it splits the graph.

    Args:
        graph: of `aten` operators; changed.
        kind: of device, which decides the kernels.
        gpu: the device, if it is one.
    """
    mode = _on_device(graph, kind)
    with V.set_fake_mode(mode), config.patch(pattern_matcher=False), _as_on(kind, gpu):
        joint_graph.canonicalize_aten_ir_passes(graph)
        remove_noop_ops(graph.graph)
        for patterns in (joint_graph.early_patterns, *joint_graph.pass_patterns):
            patterns.apply(graph.graph)
        replace_random_passes(graph)
        if kind == "cuda" and gpu is not None:
            pad_products(graph, mode, gpu)
        graph.graph.lint()
        graph.recompile()


def schedule(graph: torch.fx.GraphModule, kind: Kind, gpu: Device | None, *, is_backward: bool) -> Schedule:
    """Lower a graph of `aten` operators and schedule it.

    Args:
        graph: of forward or of backward; changed.
        kind: of device, which decides the kernels.
        gpu: the device, if it is one.
        is_backward: whether inputs may be overwritten where autograd no longer needs them.

    Raises:
        SimulationError: inductor cannot lower the graph, or its schedule contains something that has no record.
    """
    mode = _on_device(graph, kind)
    given = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(V.set_fake_mode(mode))
        stack.enter_context(config.patch(pattern_matcher=False, force_disable_caches=True))
        stack.enter_context(warnings.catch_warnings())  # the same warnings appear in a run
        warnings.filterwarnings("ignore", message="Torchinductor does not support code generation for complex")
        if kind == "cuda":
            stack.enter_context(_as_on(kind, gpu))
            stack.enter_context(as_with_nccl())
        view_to_reshape(graph)  # type: ignore[no-untyped-call]
        post_grad_passes(graph, False)
        lowering = GraphLowering(graph, example_inputs=given, shape_env=None, is_backward=is_backward)
        stack.enter_context(V.set_graph_handler(lowering))
        stack.enter_context(V.set_debug_handler(DebugContext()))
        lowering.run(*given)
        lowering._update_scheduler()
        return Reader(lowering, grouped_kernel=has_grouped_kernel(kind, gpu)).read()


def _on_device(graph: torch.fx.GraphModule, kind: Kind) -> FakeTensorMode:
    """Move the graph's tensors to a device that inductor knows."""
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
def _as_on(kind: Kind, gpu: Device | None) -> Iterator[None]:
    """Let inductor find the properties of a GPU, and its backend, on a machine without one."""

    def copy(target: torch.Tensor, source: torch.Tensor, *_: Any) -> torch.Tensor:
        source.expand(target.shape)  # the passes only need to know whether this is possible
        return target

    def backend_of(scheduler: Any, _: torch.device) -> CUDACombinedScheduling:
        return CUDACombinedScheduling(scheduler)

    with contextlib.ExitStack() as stack:
        if kind == "cuda":
            properties = properties_of(gpu)
            stack.enter_context(patched("torch._inductor.scheduler:Scheduler.create_backend", backend_of))
            create = staticmethod(lambda _: properties)
            stack.enter_context(patched("torch._inductor.runtime.hints:DeviceProperties.create", create))
        stack.enter_context(patched("torch:Tensor.copy_", copy))
        yield
