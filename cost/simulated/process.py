"""A process as one rank of many on the simulated device.

Functions of torch that must behave differently there are patched while a simulation runs, and restored after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist

from legoai.cost.simulated.autocast_device import autocast_device
from legoai.cost.simulated.calls import counted_functions
from legoai.cost.simulated.device import (
    SIM,
    Kind,
    Recorder,
    SimulationError,
    backend,
    current_stream,
    read_from_device,
    read_value,
    register,
)
from legoai.cost.simulated.large_worlds import one_rank_alone
from legoai.cost.simulated.operators.kernels import kernels_of
from legoai.cost.simulated.operators.propagation import known_metadata
from legoai.cost.simulated.operators.routing import even_routing
from legoai.cost.trace.records import WaitWork
from legoai.runtime.parallelism.mesh import forget_split_meshes
from legoai.runtime.recomputation import budget as recompute_budget
from legoai.runtime.torch_internals.compiler.dynamo import without_dynamo
from legoai.runtime.torch_internals.compiler.graphs import disable_current_modes, functorch_config
from legoai.runtime.torch_internals.distributed.collectives import AsyncCollectiveTensor
from legoai.runtime.torch_internals.distributed.fake_world import FakeStore, FakeWork, forget_meshes
from legoai.runtime.torch_internals.distributed.random_numbers import forget_random_numbers
from legoai.runtime.torch_internals.fake_tensors import FakeTensor, FakeTensorMode
from legoai.runtime.torch_internals.patching import original, patched, patched_attribute

_WRAP: Final = "torch.distributed._functional_collectives:_maybe_wrap_tensor"
_WRAP_TRACED: Final = original(_WRAP)
"""PyTorch's own function, which the simulated device replaces."""
_POLICIES: Final = tuple(
    f"torch.utils.checkpoint:{mode}.__torch_dispatch__"
    for mode in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
)
"""What runs operators that a policy of selective checkpointing sees, in forward and in recomputation."""


@contextlib.contextmanager
def simulated_device(
    recorder: Recorder, *, rank: int, world: int, kind: Kind, capability: str | None = None
) -> Iterator[FakeTensorMode]:
    """Run the body as one rank of many on the simulated device.

    Within the body, `cpu:fake,sim:fake` is the default process group, and a fake tensor mode can be entered. Patches of
    torch are undone on exit; only the device type stays registered.

    Args:
        recorder: of the trace.
        rank: of this process.
        world: number of ranks.
        kind: of device, which decides the kernels.
        capability: compute capability of a GPU, which decides some of them; None where it is not known.

    Raises:
        SimulationError: this process has a process group, or is simulating already.
    """
    if dist.is_initialized():
        raise SimulationError("this process belongs to a process group; simulate in a process of its own")
    register()
    _forget_meshes()
    backend.start(recorder, single=kind == "cpu")
    threads = torch.autograd.is_multithreading_enabled()
    with contextlib.ExitStack() as stack:
        stack.callback(_forget_meshes)
        stack.callback(forget_random_numbers)
        stack.callback(backend.stop)
        for patch in (
            _patched_fake_mode(),
            patched_meshes(),
            _patched_propagation(recorder, (kind, capability)),
            _patched_waits(),
            one_rank_alone(),
            without_dynamo(),
            _noted_policies(recorder),
            counted_functions(recorder),
            autocast_device(kind),
        ):
            stack.enter_context(patch)
        for name, silent in (("__enter__", _itself), ("__exit__", _nothing)):
            stack.enter_context(patched(f"torch.autograd.profiler:record_function.{name}", silent))
        # PyTorch compiles a backward when it is first called. A backward that retains its graph, as the first half of a
        # split one does, then donates no buffers; here it is compiled with its forward, and its tensors have no values
        # to overwrite.
        stack.enter_context(functorch_config.patch(donated_buffer=False))
        # The simulated device has no random state, and torch 2.12 asks CUDA for that of pipeline stages.
        stack.enter_context(patched("torch.random:fork_rng", lambda *_, **__: contextlib.nullcontext()))
        stack.enter_context(patched("torch.accelerator:current_stream", backend.current_stream))
        # Values reduced over other ranks are not available; on the simulated device all ranks measure the same.
        stack.enter_context(patched_attribute(recompute_budget, "agree", lambda measured, _: measured))
        stack.enter_context(even_routing())
        stack.enter_context(kernels_of(kind, capability))
        torch.autograd.set_multithreading_enabled(False)
        stack.callback(torch.autograd.set_multithreading_enabled, threads)
        dist.init_process_group(f"cpu:fake,{SIM}:fake", store=FakeStore(), rank=rank, world_size=world)
        stack.callback(dist.destroy_process_group)
        yield FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def collectives_as_traced() -> Iterator[None]:
    """Wait for functional collectives immediately, as torch does while tracing."""
    with patched(_WRAP, _WRAP_TRACED):
        yield


@contextlib.contextmanager
def _noted_policies(recorder: Recorder) -> Iterator[None]:
    """Tell the recorder while torch's modes of selective checkpointing run an operator."""
    with contextlib.ExitStack() as stack:
        for path in _POLICIES:
            stack.enter_context(patched(path, _noted(original(path), recorder)))
        yield


def _noted(dispatch: Any, recorder: Recorder) -> Any:
    def noting(*args: Any) -> Any:
        before, recorder.policy = recorder.policy, True
        try:
            return dispatch(*args)
        finally:
            recorder.policy = before

    return noting


def _itself(label: Any) -> Any:
    """No-op `record_function`; avoids its dispatch through every mode."""
    return label


def _nothing(*_: Any) -> None:
    """No-op end of a `record_function`."""


def _forget_meshes() -> None:
    """Drop the meshes that DTensor and the runtime have cached in another simulation.

    They compare equal to those of this simulation or of a later process group, but name destroyed groups and the
    coordinate of another rank: a weight sharded on such a mesh would be the shard of that rank.
    """
    forget_meshes()
    forget_split_meshes()


@contextlib.contextmanager
def _patched_fake_mode() -> Iterator[None]:
    """Bypass the device's kernels in tensor constructors, and return a constant when values are read.

    Fake tensors on a Python backend would otherwise be constructed by kernels that the backend lacks.
    """

    def read(tensor: FakeTensor) -> Any:
        if tensor.device.type != SIM:
            return tolist(tensor)
        read_from_device(tensor.numel() * tensor.itemsize)
        return _filled(tuple(tensor.shape), read_value(tensor.dtype))

    tolist = FakeTensor.tolist
    with (
        patched(_WRAP, _InFlight.apply),
        patched("torch._subclasses.fake_tensor:FakeTensorMode.avoid_device_init", property(lambda _: True)),
        patched("torch._subclasses.fake_tensor:FakeTensor.tolist", read),
    ):
        yield


class _InFlight(torch.autograd.Function):
    """The result of a functional collective, which its first use waits for, as outside fake tensor modes.

    PyTorch takes a fake mode for compilation, and would wait immediately.
    """

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor) -> torch.Tensor:
        return AsyncCollectiveTensor(result)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _filled(shape: tuple[int, ...], value: float) -> Any:
    return value if not shape else [_filled(shape[1:], value) for _ in range(shape[0])]


_MESH_METHODS: Final = ("_concatenate", "_flatten", "_unflatten")
_WITH_VALUES: Final = (
    # The mesh of the ranks over which `fully_shard` reshards after forward, where they are a part of its own.
    "torch.distributed.fsdp._fully_shard._fully_shard:_get_post_forward_mesh_info",
    # The indices that a rank has of a dim that is sharded by pieces, as of a batch whose sequences are sharded.
    "torch.distributed.tensor.placement_types:_StridedShard.local_shard_size_and_offset",
)
"""Functions that read values of tensors which they make themselves."""


@contextlib.contextmanager
def patched_meshes() -> Iterator[None]:
    """Run functions that read values of their own tensors outside fake tensor modes: of meshes and strided shards."""
    with contextlib.ExitStack() as stack:
        for name in _MESH_METHODS:
            path = f"torch.distributed.device_mesh:DeviceMesh.{name}"
            method = original(path)
            if isinstance(method, staticmethod):
                stack.enter_context(patched(path, staticmethod(_outside_fake(method.__func__))))
            else:
                stack.enter_context(patched(path, _outside_fake(method)))
        for path in _WITH_VALUES:
            stack.enter_context(patched(path, _outside_fake(original(path))))
        yield


def _outside_fake(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with disable_current_modes():  # of fake tensors, and of a compiler that traces
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def _patched_propagation(recorder: Recorder, kernels: Hashable) -> Iterator[None]:
    """Pause the recorder while DTensor propagates shapes with tensors of global shape, which no device allocates.

    Args:
        recorder: of the trace.
        kernels: what decides the kernels of the device, on which shapes depend that are known already.
    """

    def paused(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before, recorder.paused = recorder.paused, True
            try:
                return function(*args, **kwargs)
            finally:
                recorder.paused = before

        return call

    with contextlib.ExitStack() as stack:
        place = "torch.distributed.tensor._sharding_prop:ShardingPropagator"
        path = f"{place}.propagate_op_sharding_non_cached"
        stack.enter_context(patched(path, paused(original(path))))
        path = f"{place}._propagate_tensor_meta_non_cached"
        stack.enter_context(patched(path, known_metadata(paused(original(path)), kernels)))
        yield


@contextlib.contextmanager
def _patched_waits() -> Iterator[None]:
    """Record waits of streams for collectives; the `seq_id` of a work is its number."""

    def wait(work: FakeWork, *_: Any) -> bool:
        backend.record(WaitWork(current_stream(), work.seq_id))
        return True

    with patched("torch._C._distributed_c10d:FakeWork.wait", wait):
        yield
