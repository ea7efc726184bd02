"""What is the accelerator on which a lowered program runs without a GPU and without values?

It is a PyTorch device named `sim` whose backend is written in Python: tensors are fake, streams and events tell a
recorder what the program does with them, and process groups are of the `fake` backend, of any size.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import _functional_collectives
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from legoai.cost.trace import (
    Copy,
    HostWaitDevice,
    HostWaitEvent,
    HostWaitStream,
    Phase,
    Record,
    RecordEvent,
    WaitEvent,
    WaitStream,
    WaitWork,
)

SIM: Final = "sim"
"""The name of the device type."""

Kind: TypeAlias = Literal["cuda", "cpu"]
"""Whose kernels the simulated device has: which one serves attention, and what is one kernel, depends on it."""

READ_VALUE: Final = 2.0**40
"""What a value is that the program reads from the device; so large that gradients are clipped."""

aten = torch.ops.aten


class SimulationError(RuntimeError):
    """A program cannot be simulated."""


class Recorder:
    """What the simulated device tells; :class:`legoai.cost.capture.Capture` keeps it.

    Attributes:
        module: path of the module that runs.
        phase: of the step.
        paused: whether what happens is no part of the program, such as the propagation of shapes.
    """

    module: str = ""
    phase: Phase = "setup"
    paused: bool = False

    def record(self, record: Record) -> None:
        """Take the next record."""
        raise NotImplementedError


class Stream:
    """A queue of kernels, known by its number."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.stream_id = _sim.next_stream()
        self.priority = priority
        self.device = torch.device(SIM, 0)

    def wait_stream(self, other: Stream) -> None:
        """Let later work wait for what the other stream has now."""
        _sim.tell(WaitStream(self.stream_id, other.stream_id))

    def wait_event(self, event: Event) -> None:
        """Let later work wait for the event."""
        _sim.tell(WaitEvent(self.stream_id, event.number))

    def record_event(self, event: Event | None = None) -> Event:
        """Put an event behind the stream's work."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for the stream."""
        _sim.tell(HostWaitStream(self.stream_id))

    def query(self) -> bool:
        """Say that all is done, as no time passes."""
        return True

    def __enter__(self) -> Stream:
        self._outer = _sim.current
        _sim.current = self
        return self

    def __exit__(self, *_: object) -> None:
        _sim.current = self._outer


class Event:
    """A point in a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = _sim.next_event()

    def record(self, stream: Stream | None = None) -> None:
        """Be complete when the stream's earlier work is."""
        _sim.tell(RecordEvent(self.number, (stream or _sim.current).stream_id))

    def wait(self, stream: Stream | None = None) -> None:
        """Let later work of the stream wait."""
        _sim.tell(WaitEvent((stream or _sim.current).stream_id, self.number))

    def synchronize(self) -> None:
        """Let the host wait."""
        _sim.tell(HostWaitEvent(self.number))

    def query(self) -> bool:
        """Say that it is complete, as no time passes."""
        return True


_Stream: TypeAlias = Stream


class _Sim:
    """The backend module `torch.sim`; what it has is what torch asks of `torch.cuda`."""

    Stream = Stream
    Event = Event

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.streams = self.events = 0
        self.current: _Stream

    def start(self, recorder: Recorder) -> None:
        if self.recorder is not None:
            raise SimulationError("a simulation runs already in this process")
        self.recorder = recorder
        self.streams = self.events = 0
        self.current = Stream()

    def stop(self) -> None:
        self.recorder = None

    def tell(self, record: Record) -> None:
        if self.recorder is not None and not self.recorder.paused:
            self.recorder.record(record)

    def next_stream(self) -> int:
        self.streams += 1
        return self.streams - 1

    def next_event(self) -> int:
        self.events += 1
        return self.events - 1

    def is_available(self) -> bool:
        return self.recorder is not None

    def is_initialized(self) -> bool:
        return True

    def is_bf16_supported(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def current_stream(self, device: Any = None) -> _Stream:
        return self.current

    def set_stream(self, stream: _Stream) -> None:
        self.current = stream

    def stream(self, stream: _Stream | None) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if stream is None else stream

    def device(self, device: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self, device: Any = None) -> None:
        self.tell(HostWaitDevice())

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        with unset_fake_temporarily():
            return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def max_memory_allocated(self, device: Any = None) -> int:
        return 0

    def memory_allocated(self, device: Any = None) -> int:
        return 0


_sim = _Sim()


@functools.cache
def _register() -> None:
    """Make torch know the device; it cannot forget it again."""
    _setup_privateuseone_for_python_backend(SIM, backend_module=_sim)


def current_stream() -> int:
    """Return the number of the current stream."""
    return _sim.current.stream_id


@contextlib.contextmanager
def simulated_device(recorder: Recorder, *, rank: int, world: int, kind: Kind) -> Iterator[FakeTensorMode]:
    """Run what is inside as one rank of many on the simulated device.

    Inside, `cpu:fake,sim:fake` is the default process group, and a fake tensor mode can be entered. What is patched in
    torch is restored on leaving; only the device type stays known.

    Args:
        recorder: told what happens.
        rank: which.
        world: number of ranks.
        kind: whose kernels the device has.

    Raises:
        SimulationError: this process has a process group, or simulates already.
    """
    if dist.is_initialized():
        raise SimulationError("this process belongs to a process group; simulate in a process of its own")
    _register()
    _sim.start(recorder)
    threads = torch.autograd.is_multithreading_enabled()
    with contextlib.ExitStack() as stack:
        stack.callback(_sim.stop)
        for patch in (_patched_fake_mode(), _patched_meshes(), _patched_propagation(recorder), _patched_waits()):
            stack.enter_context(patch)
        stack.enter_context(_kernels(kind))
        torch.autograd.set_multithreading_enabled(False)
        stack.callback(torch.autograd.set_multithreading_enabled, threads)
        dist.init_process_group(f"cpu:fake,{SIM}:fake", store=FakeStore(), rank=rank, world_size=world)
        stack.callback(dist.destroy_process_group)
        yield FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _patched_fake_mode() -> Iterator[None]:
    """Keep tensor constructors from the device's own kernels, and answer when values are read.

    Fake tensors of a device that is a Python backend would otherwise be made by kernels that it does not have.
    """

    def read(tensor: FakeTensor) -> Any:
        if tensor.device.type != SIM:
            return original(tensor)
        read_from_device(tensor.numel() * tensor.itemsize)
        return _filled(tuple(tensor.shape))

    original = FakeTensor.tolist
    with (
        _replaced(_functional_collectives, "_maybe_wrap_tensor", _InFlight.apply),
        _replaced(FakeTensorMode, "avoid_device_init", property(lambda _: True)),
        _replaced(FakeTensor, "tolist", read),
    ):
        yield


class _InFlight(torch.autograd.Function):
    """The result of a functional collective, for which its first use waits, as it does outside of fake tensor modes.

    PyTorch takes a fake mode for compilation, and would wait at once.
    """

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor) -> torch.Tensor:
        return AsyncCollectiveTensor(result)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def read_from_device(size: int) -> None:
    """Record that the host reads bytes of a tensor and waits for them."""
    recorder = _sim.recorder
    assert recorder is not None
    where = current_stream()
    _sim.tell(
        Copy(
            stream=where,
            direction="device_to_host",
            bytes=size,
            blocking=True,
            module=recorder.module,
            phase=recorder.phase,
        )
    )
    _sim.tell(HostWaitStream(where))


def _filled(shape: tuple[int, ...]) -> Any:
    return READ_VALUE if not shape else [_filled(shape[1:]) for _ in range(shape[0])]


_MESH_METHODS: Final = (
    "_concatenate", "_flatten", "_get_mesh_tensor_from_full_mesh", "_sym_get_coordinate", "_unflatten", "__getitem__",
    "get_coordinate", "get_group", "get_local_rank", "size",
)  # fmt: skip


@contextlib.contextmanager
def _patched_meshes() -> Iterator[None]:
    """Run what meshes compute with tensors of ranks, whose values matter, outside of fake tensor modes."""
    with contextlib.ExitStack() as stack:
        for name in _MESH_METHODS:
            method = DeviceMesh.__dict__.get(name)
            if method is None:
                continue
            if isinstance(method, staticmethod):
                stack.enter_context(_replaced(DeviceMesh, name, staticmethod(_outside_fake(method.__func__))))
            else:
                stack.enter_context(_replaced(DeviceMesh, name, _outside_fake(method)))
        yield


def _outside_fake(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def _patched_propagation(recorder: Recorder) -> Iterator[None]:
    """Pause the recorder while DTensor finds out shapes with tensors of global shape, which no device allocates."""

    def paused(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before, recorder.paused = recorder.paused, True
            try:
                return function(*args, **kwargs)
            finally:
                recorder.paused = before

        return call

    with contextlib.ExitStack() as stack:
        for name in ("propagate_op_sharding_non_cached", "_propagate_tensor_meta_non_cached"):
            stack.enter_context(_replaced(ShardingPropagator, name, paused(getattr(ShardingPropagator, name))))
        yield


@contextlib.contextmanager
def _patched_waits() -> Iterator[None]:
    """Tell when a stream waits for a collective; `seq_id` of its work is the number that was given to it."""

    def wait(work: FakeWork, *_: Any) -> bool:
        _sim.tell(WaitWork(current_stream(), work.seq_id))
        return True

    with _replaced(FakeWork, "wait", wait):
        yield


_ONE_KERNEL: Final[dict[Kind, tuple[str, ...]]] = {
    "cuda": ("_fused_rms_norm", "silu_backward", "mish_backward"),
    "cpu": ("silu_backward", "mish_backward"),
}
"""Operators that are one kernel there, and fall apart on a device that has none for them."""


@contextlib.contextmanager
def _kernels(kind: Kind) -> Iterator[None]:
    """Let attention and normalisation be the kernels that a device of the kind runs, with what they save."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    attend = _attend_on_gpu if kind == "cuda" else _attend_on_cpu
    library.impl("scaled_dot_product_attention", attend, "AutogradPrivateUse1")  # type: ignore[no-untyped-call]
    for name in _ONE_KERNEL[kind]:
        library.impl(name, _never_computed, "PrivateUse1")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _never_computed(*_: Any, **__: Any) -> Any:
    raise SimulationError("the simulated device computes no values")


def _attend_on_gpu(  # noqa: PLR0917 (PyTorch's own signature)
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`scaled_dot_product_attention` by the first allowed kernel that can compute it, in PyTorch's order for CUDA.

    The conditions are those of `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`.
    """
    allowed = _cur_sdpa_kernel_backends()
    grad = torch.is_grad_enabled() and any(item.requires_grad for item in (query, key, value))
    half = query.dtype in (torch.float16, torch.bfloat16)
    width = query.shape[-1]
    grouped = query.shape[-3] != key.shape[-3]
    flash = half and attn_mask is None and width <= 256 and value.shape[-1] == width
    if SDPBackend.FLASH_ATTENTION in allowed and flash:
        pad = -width % 8
        if pad:
            scale = 1 / math.sqrt(width) if scale is None else scale
            query, key, value = (torch.nn.functional.pad(item, (0, pad)) for item in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :width] if pad else out
    if SDPBackend.EFFICIENT_ATTENTION in allowed and not grouped and width % (8 if half else 4) == 0:
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, _float_mask(attn_mask, query), grad, dropout_p, is_causal, scale=scale
        )[0]
    if SDPBackend.CUDNN_ATTENTION in allowed and half and not grouped and width % 8 == 0:
        return aten._scaled_dot_product_cudnn_attention(
            query, key, value, _float_mask(attn_mask, query), grad, dropout_p, is_causal, False, scale=scale
        )[0]
    if SDPBackend.MATH in allowed:
        return _math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    names = ", ".join(sorted(backend.name for backend in allowed))
    raise SimulationError(f"no attention kernel of {names} takes {tuple(query.shape)} {query.dtype}")


def _attend_on_cpu(  # noqa: PLR0917 (PyTorch's own signature)
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`scaled_dot_product_attention` as `aten/src/ATen/native/transformers/attention.cpp` does it on a CPU."""
    flash = SDPBackend.FLASH_ATTENTION in _cur_sdpa_kernel_backends()
    alike = query.shape[-1] == value.shape[-1]
    if flash and alike and not dropout_p and query.dim() == 4:
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=_float_mask(attn_mask, query), scale=scale
        )[0]
    return _math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _math_attention(*args: Any, **kwargs: Any) -> Any:
    return aten._scaled_dot_product_attention_math(*args, **kwargs)[0]


def _float_mask(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
