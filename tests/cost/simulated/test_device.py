"""The simulated device records streams and events, and leaves torch as it was."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from legoai.cost.simulated.device import READ_VALUE, SIM, Recorder, SimulationError
from legoai.cost.simulated.process import simulated_device
from legoai.cost.simulated.recorder import Capture
from legoai.cost.trace.records import (
    Copy,
    HostWaitDevice,
    HostWaitEvent,
    HostWaitStream,
    RecordEvent,
    WaitEvent,
    WaitStream,
)
from legoai.runtime.torch_internals.distributed.fake_world import FakeStore
from support.simulation import simulated


class ListRecorder(Recorder):
    def __init__(self) -> None:
        self.records = []

    def record(self, record) -> None:
        self.records.append(record)


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def streams() -> list:
    recorder = ListRecorder()
    with simulated_device(recorder, rank=0, world=1, kind="cuda"):
        module = torch.get_device_module(SIM)
        main, side, event = module.current_stream(), module.Stream(priority=-1), module.Event()
        with module.stream(side):
            event.record()
            assert module.current_stream() is side
        main.wait_event(event)
        side.wait_stream(main)
        event.synchronize()
        side.synchronize()
        module.synchronize()
    return recorder.records


def test_stream_and_event_waits_are_recorded():
    assert simulated.in_a_fork(streams) == [
        RecordEvent(0, 1), WaitEvent(0, 0), WaitStream(1, 0), HostWaitEvent(0), HostWaitStream(1), HostWaitDevice(),
    ]  # fmt: skip


def restored() -> bool:
    def state() -> list:
        functions = [FakeTensorMode.avoid_device_init, FakeTensor.tolist, DeviceMesh.__eq__]
        flags = [torch.autograd.is_multithreading_enabled(), id(FakeWork.__dict__["wait"])]
        return [*functions, _functional_collectives._maybe_wrap_tensor, *flags]

    before = state()
    with simulated_device(ListRecorder(), rank=0, world=4, kind="cuda"):
        inside = state()
    return before == state() and all(a != b for a, b in zip(before, inside, strict=True))


def test_patches_are_restored():
    assert simulated.in_a_fork(restored)


def groups() -> list[tuple[int, ...]]:
    with simulated_device(ListRecorder(), rank=5, world=16384, kind="cuda"):
        mesh = init_device_mesh(SIM, (2048, 8), mesh_dim_names=("dp", "tp"))
        return [tuple(dist.get_process_group_ranks(mesh.get_group(axis)))[:3] for axis in ("dp", "tp")]


def test_world_size_is_arbitrary():
    assert simulated.in_a_fork(groups) == [(5, 13, 21), (0, 1, 2)]


def read() -> tuple[object, list]:
    recorder = ListRecorder()
    with simulated_device(recorder, rank=0, world=1, kind="cuda") as fake, fake:
        return torch.zeros(2, 3, device=SIM).tolist(), recorder.records


def test_reading_values_records_a_copy_and_a_wait():
    values, records = simulated.in_a_fork(read)
    assert values == [[READ_VALUE] * 3] * 2
    assert [type(record) for record in records] == [Copy, HostWaitStream] and records[0].bytes == 24


def attention(kind: str, dtype: torch.dtype, heads: int, keys: int) -> set[str]:
    seen = Operators()
    with simulated_device(ListRecorder(), rank=0, world=1, kind=kind) as fake, fake, seen:
        query = torch.zeros(1, heads, 16, 64, dtype=dtype, device=SIM, requires_grad=True)
        key, value = (torch.zeros(1, keys, 16, 64, dtype=dtype, device=SIM) for _ in range(2))
        F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=heads != keys).sum().backward()
    return {name for name in seen.names if "attention" in name or "softmax" in name}


@pytest.mark.parametrize(
    ("kind", "dtype", "heads", "keys", "kernel"),
    [
        ("cuda", torch.bfloat16, 4, 4, "_scaled_dot_product_cudnn_attention"),
        ("cuda", torch.bfloat16, 4, 2, "_scaled_dot_product_cudnn_attention"),
        ("cuda", torch.float32, 4, 4, "_scaled_dot_product_efficient_attention"),
        ("cuda", torch.float32, 4, 2, "_safe_softmax"),
        ("cpu", torch.float32, 4, 4, "_scaled_dot_product_flash_attention_for_cpu"),
    ],
)
def test_attention_kernel_is_that_of_the_device(kind, dtype, heads, keys, kernel):
    assert f"aten.{kernel}.default" in simulated.in_a_fork(attention, kind, dtype, heads, keys)


def masked_attention(capability: str) -> set[str]:
    seen = Operators()
    device = simulated_device(ListRecorder(), rank=0, world=1, kind="cuda", capability=capability)
    with device as fake, fake, seen:
        query = torch.zeros(1, 4, 16, 64, dtype=torch.bfloat16, device=SIM, requires_grad=True)
        key = torch.zeros(1, 2, 16, 64, dtype=torch.bfloat16, device=SIM)
        mask = torch.zeros(16, 16, dtype=torch.bool, device=SIM)
        F.scaled_dot_product_attention(query, key, key, mask, enable_gqa=True).sum().backward()
    return seen.names


@pytest.mark.parametrize(
    ("capability", "kernel"), [("9.0", "_scaled_dot_product_cudnn_attention"), ("8.0", "_softmax")]
)
def test_cudnn_is_first_since_hopper_and_behind_products_before(capability: str, kernel: str):
    names = simulated.in_a_fork(masked_attention, capability)
    assert any(kernel in name for name in names), names
    assert any("cudnn" in name for name in names) == (capability == "9.0")


def flat_attention(kind: str, dtype: torch.dtype, shape: tuple[int, ...]) -> set[str]:
    seen = Operators()
    with simulated_device(ListRecorder(), rank=0, world=1, kind=kind) as fake, fake, seen:
        query, key, value = (torch.zeros(shape, dtype=dtype, device=SIM, requires_grad=True) for _ in range(3))
        F.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()
    return {name for name in seen.names if "attention" in name or "softmax" in name}


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(8, 16, 64), (16, 64)])
def test_attention_without_batch_and_heads_is_products_and_a_softmax(kind, dtype, shape):
    names = simulated.in_a_fork(flat_attention, kind, dtype, shape)
    assert "aten._safe_softmax.default" in names
    assert not any("_attention" in name for name in names)


def of_cudnn() -> set[str]:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return attention("cuda", torch.bfloat16, 4, 2)


def test_cudnn_attention_supports_grouped_queries():
    # `can_use_cudnn_attention` of torch's sdp_utils.cpp: check_batch_size_and_num_heads_dense<true /*enable_gqa*/, …>.
    names = simulated.in_a_fork(of_cudnn)
    assert {"aten._scaled_dot_product_cudnn_attention.default"} < names


def saved_by_norm() -> list[tuple[int, ...]]:
    saved = []
    with simulated_device(ListRecorder(), rank=0, world=1, kind="cuda") as fake, fake:
        x, weight = torch.zeros(4, 8, device=SIM, requires_grad=True), torch.ones(8, device=SIM, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(tuple(t.shape)), t)[1], lambda t: t):
            F.rms_norm(x, (8,), weight)
    return saved


def test_fused_norm_saves_input_weight_and_row_statistics():
    assert sorted(simulated.in_a_fork(saved_by_norm)) == [(4, 1), (4, 8), (8,)]


def nested() -> None:
    with (
        simulated_device(ListRecorder(), rank=0, world=1, kind="cuda"),
        simulated_device(ListRecorder(), rank=0, world=1, kind="cuda"),
    ):
        pass


def test_second_simulation_in_a_process_is_refused():
    with pytest.raises(SimulationError, match="process of its own"):
        simulated.in_a_fork(nested)


def allocated() -> DTensor:
    """A parameter in shards over two ranks, as `to_empty` allocates it."""
    shards = distribute_tensor(torch.empty(4), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
    return torch.empty_like(shards)


def cut_behind_a_simulation() -> list[float]:
    with simulated_device(ListRecorder(), rank=0, world=2, kind="cpu"):
        allocated()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    mesh = allocated().device_mesh
    return distribute_tensor(torch.arange(4.0), mesh, [Shard(0)], src_data_rank=None).to_local().tolist()


def test_simulated_meshes_do_not_leak_into_later_process_groups():
    """DTensor keeps the meshes of its results, which are equal for all ranks: rank 1 would get the shard of rank 0."""
    assert simulated.in_a_fork(cut_behind_a_simulation) == [2.0, 3.0]


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        (SimulationError("not captured [LP637]"), "not captured [LP637]"),
        (ValueError("a value"), "the program failed: ValueError: a value"),
        (NotImplementedError("no kernel\n\nCPU: registered"), "the program failed: NotImplementedError: no kernel"),
    ],
)
def test_what_a_stage_wraps_is_reported(cause: Exception, message: str):
    with pytest.raises(SimulationError) as caught, Capture().errors():
        raise RuntimeError("\n            [Stage 0] failed to run forward:\n            args: ()") from cause
    assert str(caught.value) == message


def test_model_that_ends_the_process_is_reported():
    with pytest.raises(SimulationError, match="the program failed: SystemExit: 0"), Capture().errors():
        raise SystemExit(0)
