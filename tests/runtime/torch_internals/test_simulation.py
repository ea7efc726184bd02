"""Effects of the patches of a simulation; each test fails without the patches that name it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from legoai.cost.simulated.device import READ_VALUE, SIM, backend
from legoai.cost.simulated.dispatch import Dispatch
from legoai.cost.simulated.host import host_memory
from legoai.cost.simulated.operators.autocast import autocast_rules
from legoai.cost.simulated.process import simulated_device
from legoai.cost.simulated.recorder import Capture
from legoai.cost.trace.records import (
    UNDER_POLICY,
    Allocate,
    Collective,
    Copy,
    Free,
    HostWaitStream,
    Kernel,
    Resize,
    WaitEvent,
    WaitWork,
)
from legoai.runtime.recomputation.policies import keep_outputs
from legoai.runtime.torch_internals.distributed import collectives
from legoai.runtime.torch_internals.operators import TorchDispatchMode
from support.simulation import simulated


class Operators(TorchDispatchMode):
    """Notes the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def simulate(function, *, world: int = 1):
    """Call a function on rank 0 of a simulated world, with the capture that records it; returns what it returns."""
    return simulated.in_a_fork(_simulate, function, world)


def _simulate(function, world: int):
    recorder = Capture()
    with simulated_device(recorder, rank=0, world=world, kind="cuda") as fake, host_memory("cuda"):
        recorder.mesh = init_device_mesh(SIM, (world,), mesh_dim_names=("dp",))
        with fake, recorder.hooks(), Dispatch(recorder):
            return function(recorder)


def constructors(_: Capture) -> list[tuple[str, tuple[int, ...]]]:
    made = [torch.empty(2, device=SIM), torch.zeros(2, device=SIM), torch.tensor([1, 2], device=SIM)]
    return [(item.device.type, tuple(item.shape)) for item in made]


def test_constructors_need_no_device_kernel():
    assert simulate(constructors) == [(SIM, (2,))] * 3


def test_values_have_the_type_of_their_dtype():
    def read(_: Capture):
        tensors = [torch.zeros(2, dtype=dtype, device=SIM) for dtype in (torch.int64, torch.bool, torch.bfloat16)]
        return [item.tolist() for item in tensors], [type(item[0].item()) for item in tensors]

    whole = int(READ_VALUE)
    lists, types = simulate(read)
    assert lists == [[whole, whole], [True, True], [READ_VALUE] * 2]
    assert types == [int, bool, float]
    assert type(lists[0][0]) is int


def values(recorder: Capture):
    read = torch.zeros(2, 3, device=SIM).tolist()
    return read, [type(item) for item in recorder.records if isinstance(item, Copy | HostWaitStream)]


def test_value_reads_are_recorded():
    assert simulate(values) == ([[READ_VALUE] * 3] * 2, [Copy, HostWaitStream])


def page_locked(_: Capture) -> tuple[str, tuple[int, ...]]:
    pinned = torch.ones(2, 3).t().pin_memory()
    return pinned.device.type, pinned.stride()


def test_host_memory_is_page_locked():
    assert simulate(page_locked) == ("cpu", (1, 3))


def convolved(recorder: Capture) -> list[bool]:
    images = torch.empty(2, 8, 6, 6, device=SIM)
    weight = torch.empty(16, 8, 3, 3, device=SIM)
    return [
        torch.nn.functional.conv2d(images.to(memory_format=layout), weight).is_contiguous(memory_format=layout)
        for layout in (torch.channels_last, torch.contiguous_format)
    ]


def test_convolutions_leave_the_layout_of_images():
    assert simulate(convolved) == [True, True]


def functional(recorder: Capture) -> tuple[bool, list[type]]:
    out = collectives.all_gather_single(torch.ones(4, device=SIM), 0, dist.group.WORLD)
    on_its_way = isinstance(out, collectives.AsyncCollectiveTensor)
    issued = len(recorder.records)
    out + 1
    return on_its_way, [type(item) for item in recorder.records[issued:] if isinstance(item, WaitWork)]


def test_collectives_are_awaited_at_first_use():
    assert simulate(functional, world=2) == (True, [WaitWork])


def waited(recorder: Capture) -> tuple[int, int]:
    work = dist.all_reduce(torch.ones(4, device=SIM), async_op=True)
    issued = next(item.work for item in recorder.records if isinstance(item, Collective))
    assert not any(isinstance(item, WaitWork) for item in recorder.records)
    work.wait()
    return issued, next(item.work for item in recorder.records if isinstance(item, WaitWork))


def test_waits_for_collectives_are_recorded():
    issued, awaited = simulate(waited, world=2)
    assert issued == awaited


def labelled(_: Capture) -> list[str]:
    with Operators() as seen, torch.autograd.profiler.record_function("label"):
        pass
    return seen.names


def test_profiler_labels_are_not_recorded():
    assert simulate(labelled) == []


def forked(_: Capture) -> int:
    asked = []
    original = torch.cuda.get_rng_state
    torch.cuda.get_rng_state = lambda device: asked.append(device) or torch.zeros(1, dtype=torch.uint8)
    try:
        with torch.random.fork_rng(devices=[torch.device(SIM, 0)]):
            pass
    finally:
        torch.cuda.get_rng_state = original
    return len(asked)


def test_fork_rng_queries_no_other_device():
    assert simulate(forked) == 0


def waited_for_event(recorder: Capture) -> list[int]:
    stream, event = backend.Stream(), backend.Event()
    event.record()
    with backend.stream(stream):
        torch.accelerator.current_stream().wait_event(event)
    waiting = (item for item in recorder.records if isinstance(item, WaitEvent))
    return [item.stream - stream.stream_id for item in waiting]


def test_accelerator_stream_is_the_recorded_one():
    assert simulate(waited_for_event) == [0]


def resized(recorder: Capture) -> list[int]:
    tensor = torch.empty(4, device=SIM)
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(16)
    return [item.bytes for item in recorder.records if isinstance(item, Resize)]


def test_resized_storages_are_recorded():
    assert simulate(resized) == [0, 16]


def cast(recorder: Capture) -> list[int]:
    weight = torch.nn.Parameter(torch.empty(4, 4, device=SIM))
    values = torch.empty(8, 4, device=SIM)

    def copies() -> int:
        live = {item.storage: item.bytes for item in recorder.records if isinstance(item, Allocate)}
        for item in recorder.records:
            if isinstance(item, Free):
                live.pop(item.storage)
        return list(live.values()).count(weight.numel() * 2)

    with autocast_rules("cuda"):
        with torch.autocast(SIM, dtype=torch.bfloat16):
            values @ weight
            inside = copies()
        return [inside, copies()]


def test_cast_cache_ends_with_autocast():
    assert simulate(cast) == [1, 0]


def propagated(recorder: Capture) -> list[int]:
    mesh = recorder.mesh
    assert mesh is not None
    left = distribute_tensor(torch.empty(64, 8, device=SIM), mesh, [Shard(0)], src_data_rank=None)
    right = distribute_tensor(torch.empty(8, 16, device=SIM), mesh, [Replicate()], src_data_rank=None)
    before = len(recorder.records)
    product = left @ right
    assert product.shape == (64, 16)
    return [item.bytes for item in recorder.records[before:] if isinstance(item, Allocate)]


def test_dtensor_shape_propagation_is_not_recorded():
    assert simulate(propagated, world=4) == [16 * 16 * 4]


class Saved(nn.Module):
    """Two products, of which the policy saves the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4, bias=False, device=SIM) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply twice."""
        return self.second(self.first(x).sin()).cos()


def under_a_policy(recorder: Capture) -> list[tuple[str, str, bool]]:
    module = Saved()
    x = torch.zeros(2, 4, device=SIM)
    begin = len(recorder.records)
    checkpoint(module, x, use_reentrant=False, context_fn=keep_outputs("matmul")).sum().backward()
    return [
        (item.op.removeprefix("aten."), item.phase, UNDER_POLICY in item.attributes)
        for item in recorder.records[begin:]
        if isinstance(item, Kernel) and ("sin" in item.op or "cos" in item.op or item.op == "aten.mm")
    ]


def test_operators_under_a_policy_are_recorded_as_such():
    found = simulate(under_a_policy)
    forward = [(op, seen) for op, phase, seen in found if phase != "backward" and phase != "recompute"]
    assert forward == [("mm", True), ("sin", True), ("mm", True), ("cos", True)]
    again = [(op, seen) for op, phase, seen in found if phase == "recompute"]
    assert again == [("sin", True)], "products are saved, and recomputation stops at what backward needs"
    assert not any(seen for _, phase, seen in found if phase == "backward")


class Identity(torch.autograd.Function):
    """Issues nothing."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Doubled(torch.autograd.Function):
    """Issues one kernel in each direction."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def autograd_functions(recorder: Capture) -> list[tuple[str, str, tuple]]:
    recorder.next_batch()
    x = torch.ones(4, device=SIM, requires_grad=True)
    begin = len(recorder.records)
    inside = DTensor.from_local(Doubled.apply(Identity.apply(Identity.apply(x))), recorder.mesh, run_check=False)
    inside.to_local().sum().backward()
    kernels = [item for item in recorder.records[begin:] if isinstance(item, Kernel)]
    return [(item.op.removeprefix("aten."), item.issuer, item.calls) for item in kernels]


def test_calls_of_autograd_functions_are_recorded():
    assert simulate(autograd_functions) == [
        ("mul", "python", (("function", 2),)),
        ("sum", "python", (("conversion", 2),)),
        ("ones_like", "python", ()),
        ("mul", "function", (("conversion", 1), ("conversion backward", 2))),
    ]
