"""A compiled module saves what PyTorch's compiler saves, and runs the kernels that inductor schedules."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from legoai.cost.compilation import graphs, inductor  # noqa: F401 (imported once, before the processes that need it)
from legoai.cost.compilation.modules import compilation
from legoai.cost.simulated.device import SimulationError
from legoai.cost.simulated.process import simulated_device
from legoai.cost.simulated.recorder import Capture
from legoai.cost.trace.records import Kernel
from legoai.cost.trace.trace import Trace
from legoai.runtime import compile_within, keep_outputs
from legoai.runtime.recomputation.compiled import BackendWithin
from support.simulation import simulated
from support.training import programs

SHAPE = (2, 32, programs.DIM)


def saved_bytes(block: torch.nn.Module, x: torch.Tensor, table: torch.Tensor) -> list[int]:
    """Sizes of the storages that a call of a block saves, without its parameters."""
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block(x, table)
    for parameter in block.parameters():
        held.pop(parameter.untyped_storage()._cdata, None)
    del out
    return sorted(held.values())


def block_of(policy: str | None) -> torch.nn.Module:
    """A block, or one with a selective checkpoint."""
    block = programs.Block()
    return block if policy is None else programs.checkpoint_wrapper(block, context_fn=keep_outputs(policy))


def simulated_block(backend: str | BackendWithin, policy: str | None = None) -> tuple[list[int], int, int]:
    """Saved bytes of a compiled block on a simulated CPU, and its numbers of fused kernels in forward and backward."""
    recorder = Capture()
    with simulated.compiling(recorder, "cpu"):
        block = block_of(policy)
        block.compile(backend=backend, fullgraph=True)
        x = torch.empty(SHAPE, requires_grad=True)
        table = torch.empty(2, 64, 4, dtype=torch.float64)
        sizes = saved_bytes(block, x, table)
        recorder.phase = recorder.outside = "forward"
        before = len(recorder.records)
        block(x, table).backward(torch.empty(SHAPE))
    made = [item for item in recorder.records[before:] if isinstance(item, Kernel) and item.op.startswith("fused")]
    phases = Counter(item.phase for item in made)
    return sizes, phases["forward"], phases["backward"]


def real_block(backend: str | BackendWithin, policy: str | None = None) -> tuple[list[int], list[int]]:
    """Saved bytes of a block that PyTorch compiles for the CPU, and the fused groups of each graph."""
    from torch._inductor import config
    from torch._inductor.scheduler import FusedSchedulerNode, SchedulerNode

    groups: list[int] = []

    def count(nodes: list) -> list:
        groups.append(sum(isinstance(node, FusedSchedulerNode | SchedulerNode) for node in nodes))
        return nodes

    block = block_of(policy)
    block.compile(backend=backend, fullgraph=True)
    x = torch.randn(SHAPE, requires_grad=True)
    table = programs.rotary(64, programs.DIM // programs.HEADS)
    with config.patch(_post_fusion_custom_pass=count, force_disable_caches=True):
        sizes = saved_bytes(block, x, table)
        block(x, table).sum().backward()
    return sizes, groups


@pytest.mark.slow
def test_saved_tensors_equal_the_real_partitioner():
    ours, _, _ = simulated.in_a_fork(simulated_block, "inductor")
    real, _ = simulated.in_a_fork(real_block, "aot_eager_decomp_partition")
    assert ours == real


@pytest.mark.parametrize(
    ("amount", "backend", "like"),
    [
        (0.5, "aot_eager", "aot_eager"),
        pytest.param(0.1, "inductor", "aot_eager_decomp_partition", marks=pytest.mark.slow),
    ],
)
def test_budget_saves_the_tensors_of_real_compilation(amount: float, backend: str, like: str):
    ours, _, _ = simulated.in_a_fork(simulated_block, compile_within(amount, by="knapsack", backend=backend))
    real, _ = simulated.in_a_fork(real_block, compile_within(amount, by="knapsack", backend=like))
    eager = saved_bytes(programs.Block(), torch.randn(SHAPE), programs.rotary(64, programs.DIM // programs.HEADS))
    assert ours == real
    assert sum(ours) < 0.7 * sum(eager)


@pytest.mark.slow
def test_selective_checkpoint_saves_the_tensors_of_real_compilation():
    ours, _, _ = simulated.in_a_fork(simulated_block, "inductor", "matmul")
    real, _ = simulated.in_a_fork(real_block, "aot_eager_decomp_partition", "matmul")
    plain, _, _ = simulated.in_a_fork(simulated_block, "inductor")
    # A cpu's generator is saved whole for the attention that is recomputed; a GPU's is two numbers on the host.
    real.remove(torch.get_rng_state().nbytes)
    assert ours == real
    assert sum(ours) < sum(plain)


@pytest.mark.slow
def test_saved_tensors_and_kernels_equal_real_inductor():
    ours, forward, backward = simulated.in_a_fork(simulated_block, "inductor")
    real, generated = simulated.in_a_fork(real_block, "inductor")
    assert ours == real
    assert [forward, backward] == generated


def test_checkpoint_policies_are_compared_by_saved_operators():
    from legoai.cost.compilation.modules import _structure

    def block(*kept: str) -> torch.nn.Module:
        return programs.checkpoint_wrapper(programs.FeedForward(), context_fn=keep_outputs(*kept))

    assert _structure(block("matmul")) == _structure(block("matmul"))
    assert _structure(block("matmul")) != _structure(block("attention"))
    wide = block("matmul")
    wide.scale = 2.0
    assert _structure(wide) != _structure(block("matmul"))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"backend": "eager"}, "backend eager"),
        ({"options": {"epilogue_fusion": True}}, "epilogue_fusion"),
    ],
)
def test_unsupported_compile_arguments_are_refused(arguments, why):
    with compilation(Capture(), "cuda"), pytest.raises(SimulationError, match=why):
        programs.Block().compile(**arguments)


@pytest.mark.parametrize(
    ("mode", "kind", "replayed"),
    [
        (None, "cuda", False),
        ("max-autotune-no-cudagraphs", "cuda", False),
        ("max-autotune", "cuda", True),
        ("reduce-overhead", "cuda", True),
        ("reduce-overhead", "cpu", False),
    ],
)
def test_cuda_graph_modes_apply_on_gpus_only(mode, kind, replayed):
    assert graphs.Options.of("inductor", mode, kind) == graphs.Options(inductor=True, replayed=replayed)


def test_compiling_a_non_function_is_refused_and_torch_restored():
    before = torch.compile
    with compilation(Capture(), "cuda"), pytest.raises(SimulationError, match=r"module\.compile"):
        torch.compile(functools.partial(torch.add, 1))
    assert torch.compile is before


def test_cuda_graph_is_launched_by_one_host_call():
    from legoai.cost.timing.engine import simulate
    from legoai.cost.timing.timeline import Cost, Host

    kernel = Kernel(
        stream=0, op="fused(aten.mul)", inputs=(), outputs=(), flops=0, bytes_read=0, bytes_written=0, attributes={},
        module="", phase="forward",
    )  # fmt: skip
    replayed = dataclasses.replace(kernel, attributes={"replayed": True})

    def end(record: Kernel) -> float:
        trace = Trace(rank=0, world=1, stage=0, items=(record,) * 10)
        cost = Cost(seconds=1e-6, resource="compute", model="given")
        return simulate(trace, lambda _: cost, Host(dispatch_seconds=5e-6)).end

    assert end(kernel) == pytest.approx(51e-6)  # the host is behind each
    assert end(replayed) == pytest.approx(10e-6)
    assert all("replayed" in item.attributes for item in simulated.in_a_fork(_replayed) if "fused" in item.op)


def _replayed() -> list[Kernel]:
    recorder = Capture()
    with simulated.compiling(recorder):
        block = programs.FeedForward()
        block.compile(mode="reduce-overhead")
        block(torch.empty(SHAPE))
    found = [item for item in recorder.records if isinstance(item, Kernel)]
    assert found
    return found


class _LogSumExp(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(x.float(), -1)


def _kernels_over(*shape: int) -> list[Kernel]:
    recorder = Capture()
    with simulated.compiling(recorder), torch.no_grad():
        module = _LogSumExp()
        module.compile()
        module(torch.empty(*shape, dtype=torch.bfloat16))
    return [item for item in recorder.records if isinstance(item, Kernel) and item.op.startswith("fused")]


def test_large_reduction_counts_all_elements():
    rows, columns = 2**16, 2**15  # 2.1 · 10⁹, as the logits of a large batch
    (kernel,) = simulated.in_a_fork(_kernels_over, rows, columns)
    assert (kernel.bytes_read, kernel.bytes_written) == (2 * rows * columns, 4 * rows)


class _WithWeights(torch.nn.Module):
    """Returns a result among constants, as attention of `transformers` does, whose weights are None where not made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[None, torch.Tensor, int, torch.Tensor, None]:
        out = self.linear(x)
        return None, out, 3, out.sum(), None


def _returned_among_constants(backend: str) -> list[object]:
    with simulated.compiling(Capture()):
        module = _WithWeights()
        module.compile(backend=backend, fullgraph=True)
        calls = [module(torch.empty(4, 8, requires_grad=True)) for _ in range(2)]
        calls[1][1].sum().backward()
        assert module.linear.weight.grad is not None
        return [tuple(item.shape) if isinstance(item, torch.Tensor) else item for call in calls for item in call]


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compiled_module_returns_none_where_its_forward_does(backend):
    assert simulated.in_a_fork(_returned_among_constants, backend) == [None, (4, 8), 3, (), None] * 2


class _Positions(torch.nn.Module):
    def forward(self, length: int) -> torch.Tensor:
        return torch.arange(length, device="sim").float().exp()


def _computed_from_nothing(backend: str) -> tuple[list[tuple[int, ...]], int]:
    recorder = Capture()
    with simulated.compiling(recorder):
        module = _Positions()
        module.compile(backend=backend, fullgraph=True)
        shapes = [tuple(module(length).shape) for length in (4, 4, 6)]
    return shapes, sum(isinstance(item, Kernel) for item in recorder.records)


def test_compiled_module_may_take_no_tensor():
    assert simulated.in_a_fork(_computed_from_nothing, "inductor") == ([(4,), (4,), (6,)], 3)
    assert simulated.in_a_fork(_computed_from_nothing, "aot_eager")[0] == [(4,), (4,), (6,)]


def hooks_of_a_unit() -> list[bool]:
    """For each hook of two modules that are one FSDP unit, whether it is known as one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with simulated_device(Capture(), rank=0, world=2, kind="cuda") as fake:
        mesh = init_device_mesh("sim", (2,))
        with fake, torch.device("sim"):
            modules = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
            fully_shard(modules, mesh=mesh)
            hooks = [(item._forward_pre_hooks, item._forward_hooks) for item in modules]
    return [graphs.is_of_unit(hook) for pair in hooks for held in pair for hook in held.values()]


def test_unit_hooks_of_several_modules_run_outside_of_graphs():
    assert simulated.in_a_fork(hooks_of_a_unit) == [True] * 4
    assert not graphs.is_of_unit(print)
