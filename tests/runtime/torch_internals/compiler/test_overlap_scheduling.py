"""Torch's overlap scheduler uses the given times only, on a machine without a GPU."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from torch import fx

from legoai.runtime.torch_internals.compiler.graph_passes import make_fx
from legoai.runtime.torch_internals.compiler.overlap_scheduling import schedule
from legoai.runtime.torch_internals.distributed.fake_world import FakeStore
from legoai.runtime.torch_internals.fake_tensors import FakeTensorMode
from support.simulation.simulated import in_a_fork

SIZE = 64
COLLECTIVES = torch.ops._c10d_functional
NAMES = {
    COLLECTIVES.all_gather_into_tensor.default: "gather",
    COLLECTIVES.all_gather_into_tensor_out.default: "gather",
    COLLECTIVES.wait_tensor.default: "wait",
    torch.ops.aten.mm.default: "product",
}
THREE = ["gather", "wait", "gather", "product", "wait", "gather", "product", "wait", "product"]


def order(gather: float, product: float) -> list[str]:
    """The gathers, waits and products of three layers, which take the given milliseconds."""
    return in_a_fork(_order, gather, product)


def _order(gather: float, product: float) -> list[str]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)

    def step(value: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
        for shard in shards:
            value = value @ COLLECTIVES.wait_tensor(COLLECTIVES.all_gather_into_tensor(shard, 2, "0"))
        return value

    with FakeTensorMode():
        shards = [torch.empty(SIZE // 2, SIZE) for _ in range(3)]
        module = make_fx(step)(torch.empty(SIZE, SIZE), *shards)
    first, *_, last = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    last.kwargs = {"behind": (first,)}

    def milliseconds(node: fx.Node, _: int | None) -> float:
        return {"gather": gather, "product": product}.get(NAMES.get(node.target, ""), 0.0)

    asks_nccl = "torch._inductor.comm_analysis.estimate_nccl_collective_runtime_from_fx_node"
    with mock.patch(asks_nccl, side_effect=AssertionError("times are given")):
        schedule(module, milliseconds, megabytes=0.02)
    return [NAMES[node.target] for node in module.graph.nodes if node.target in NAMES]


def test_overlap_scheduler_uses_the_given_times():
    assert order(1.0, 1.0) == THREE
    assert order(1.0, 10.0) == ["gather", "wait", "gather", "product", "wait", "product", "product"]  # of both at once
    assert order(1.0, 0.0) == ["gather", "wait", "product", "product", "product"]
