"""Checkpoints in compiled graphs that break: nothing of them is compiled, in a real run and on the simulated device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from legoai.cost.capture import capture
from legoai.cost.compilation.modules import has_graph_break, parts_of
from legoai.cost.trace.records import Kernel
from legoai.runtime import compile_within, keep_outputs
from legoai.runtime.attention.kernel_choice import attention_kernel
from legoai.runtime.device import Device
from legoai.runtime.parallelism.experts import limit_capacity
from legoai.runtime.training.batches import Batches
from legoai.runtime.training.step import take_step
from support.marks import slow_but
from support.simulation.simulated import Seen, Zeros, steady
from support.simulation.simulator import in_the_simulator
from support.texts.plans import lowered
from support.training.recorded import even_routing, evenly_traced


class Experts(nn.Module):
    """A layer that is called like experts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, rows: torch.Tensor, rows_per_expert: torch.Tensor) -> torch.Tensor:
        return self.inner(rows)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 8), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(self.router(x).tanh(), torch.tensor([len(x)]))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wo = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wo(self.norm(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x).cos()
        return x + self.feed_forward(x).sin()


class Root(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x * 2).abs() + 1


def checkpointed(module: nn.Module, *keep: str) -> nn.Module:
    return checkpoint_wrapper(module, **({"context_fn": keep_outputs(*keep)} if keep else {}))


def compiled_block(kind: str, compiled: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A module by what of it is compiled and checkpointed, with the one that holds the break."""
    block = Block()
    experts = block.feed_forward.experts
    match kind:
        case "compiled":
            return compiled(block), experts
        case "compiled, then checkpointed":
            return checkpointed(compiled(block)), experts
        case "checkpointed by a list, then compiled":
            return compiled(checkpointed(block, "matmul")), experts
        case "compiled around a checkpoint":
            return compiled(Root(checkpointed(block))), experts
        case "compiled around a checkpoint by a list":
            return compiled(Root(checkpointed(block, "matmul"))), experts
        case "compiled around a checkpointed part":
            block.feed_forward = checkpointed(block.feed_forward)
            return compiled(block), experts
        case "a part compiled in a checkpoint":
            compiled(block.attention)
            return checkpointed(block), experts
        case "a part checkpointed by a list, then compiled":
            block.attention = compiled(checkpointed(block.attention, "matmul"))
            return block, experts
    raise AssertionError(kind)


GRAPHS = {
    "compiled": 3,  # attention, the router, and the end of the block
    "compiled, then checkpointed": 3,
    "checkpointed by a list, then compiled": 0,
    "compiled around a checkpoint": 2,
    "compiled around a checkpoint by a list": 2,
    "compiled around a checkpointed part": 2,
    "a part compiled in a checkpoint": 1,
    "a part checkpointed by a list, then compiled": 1,
}


@pytest.mark.parametrize("kind", slow_but(GRAPHS, "checkpointed by a list, then compiled"))
def test_what_torch_compiles_around_a_break(kind: str):
    torch.compiler.reset()
    seen: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        seen.append(graph)
        return graph.forward

    def compiled(module: nn.Module) -> nn.Module:
        module.compile(backend=backend, dynamic=False)
        return module

    module, experts = compiled_block(kind, compiled)
    limit_capacity(experts, capacity_factor=1.0)
    for _ in range(2):
        module(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert len(seen) == GRAPHS[kind]


@pytest.mark.slow
def test_budget_of_the_compiler_holds_between_breaks():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    block = Block()
    limit_capacity(block.feed_forward.experts, capacity_factor=1.0)
    block.compile(backend=compile_within(0.5, by="greedy", backend="aot_eager"), dynamic=False)
    block(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3


def test_checkpoints_around_a_break_have_no_parts():
    block = Block()
    limit_capacity(block.feed_forward.experts, capacity_factor=1.0)
    whole = checkpointed(block)
    assert has_graph_break(whole)
    assert list(parts_of(whole)) == list(parts_of(Root(whole))) == []
    block.feed_forward = checkpointed(block.feed_forward)
    assert list(parts_of(block)) == [block.attention]
    block.attention = checkpointed(block.attention)
    assert list(parts_of(block)) == [block.attention]


PLAN = """plan experts
model   mixtral("tiny")
cluster cpu(devices = 2)
batch   (global = 4, micro = 2, seq_len = 64)
mesh    (dp_shard = 2, ep = 2)
shard standard on ep
fsdp blocks on dp_shard
precision (param = fp32)
"""
BLOCKS = "compile { layers.* = aot_eager(fullgraph = false) }"
CASES = {
    "a list, then compiled": f"checkpoint {{ layers.* = selective([attention, matmul]) }}\n{BLOCKS}",
    "compiled around lists": """checkpoint { layers.* = selective([attention, matmul]) }
        compile { root = aot_eager(fullgraph = false) }""",
    "compiled around full": "checkpoint { layers.* = full }\ncompile { root = aot_eager(fullgraph = false) }",
    "compiled around a part": f"checkpoint {{ layers.*.feed_forward = full }}\n{BLOCKS}",
    "parts": """checkpoint { layers.*.attention = selective([attention, matmul]) }
        compile { layers.*.attention = aot_eager }""",
}
UNEQUAL = {
    f"aten.{name}"
    for name in (
        *("aminmax", "arange", "eq", "mul", "promote_types", "remainder", "scatter", "scatter_", "zeros", "zeros_like"),
        *("_to_copy", "copy_", "scalar_tensor", "add", "add_"),
        *("_fused_rms_norm_backward", "div", "pow", "sum"),
    )
}
"""Operators of the hooks that route evenly, of `one_hot`, of gloo's copies, of sums of gradients in place, and of the
backward of a compiled norm, which AOT autograd decomposes or not, by what the process has imported."""


class SeenInGraphs(Seen):
    """Notes the operators of compiled graphs too; beneath other modes dynamo compiles nothing."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def real_kernels(text: str) -> Counter[str]:
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile(text, "program.py", "exec"), namespace)
    trainer = evenly_traced(namespace["trainer"]())
    torch.compiler.reset()
    with attention_kernel(trainer.attention_kernel):
        training = trainer.prepare(Device(type="cpu"), seed=0)
        batches = Batches(training, Zeros(trainer))
        with even_routing(training.model):
            take_step(trainer, training, batches, step=0)
            with SeenInGraphs() as seen:
                take_step(trainer, training, batches, step=1)
    return Counter(op for op, _ in seen.kernels)


def simulated_kernels(text: str) -> Counter[str]:
    records = steady(capture(text, world=2, rank=0, kind="cpu"))
    return Counter(item.op for item in records if isinstance(item, Kernel))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_operators_beside_broken_checkpoints_equal_a_real_run(name: str, gloo):
    text = lowered(f"{PLAN}{CASES[name]}").text
    real, found = gloo(2)(real_kernels, text)[0], in_the_simulator(simulated_kernels, text)
    compared = (real.keys() | found.keys()) - UNEQUAL
    assert {op: found[op] for op in compared} == {op: real[op] for op in compared}


@pytest.mark.slow
def test_products_of_lists_in_graphs_of_inductor_equal_a_real_run(gloo):
    """The policy of a checkpoint that broke a graph sees its operators, which compiled parts would hide."""
    checkpoint = "checkpoint { layers.*.feed_forward = selective([matmul]) }"
    text = lowered(f"{PLAN}{checkpoint}\ncompile {{ layers.* = inductor(fullgraph = false) }}").text
    real, found = gloo(2)(real_kernels, text)[0], in_the_simulator(simulated_kernels, text)
    assert found["aten.mm"] == real["aten.mm"] > 0
