"""The simulated accelerator, which runs a program without a GPU and without values.

It is a PyTorch device named `sim` whose backend is written in Python: tensors are fake, streams and events report their
use to a recorder, and process groups are of the `fake` backend, of any size.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Final, Protocol, TypeAlias

import torch

from legoai.cost.trace.records import (
    Call,
    Calls,
    Copy,
    HostWaitDevice,
    HostWaitEvent,
    HostWaitStream,
    Issuer,
    Phase,
    Record,
    RecordEvent,
    WaitEvent,
    WaitStream,
)
from legoai.runtime.torch_internals.fake_tensors import unset_fake_temporarily
from legoai.runtime.torch_internals.operators import register_python_backend
from legoai.specs.cluster import DeviceKind

SIM: Final = "sim"
"""The name of the device type."""

Kind: TypeAlias = DeviceKind
"""The kind of device to simulate. It decides, for example, the attention kernel and which operators are one kernel."""

READ_VALUE: Final = 2.0**40
"""Result of reading a value from the device; large enough that gradients are clipped."""


def read_value(dtype: torch.dtype) -> float | int | bool:
    """Return the result of reading a value of a dtype, as Python has it."""
    if dtype == torch.bool:
        return True
    return READ_VALUE if dtype.is_floating_point or dtype.is_complex else int(READ_VALUE)


aten = torch.ops.aten


class SimulationError(RuntimeError):
    """A program cannot be simulated."""


class Recorder(Protocol):
    """Recipient of the simulated device's records, such as :class:`legoai.cost.simulated.recorder.Capture`.

    Attributes:
        module: path of the module that runs.
        unit: path of the unit whose parameters are gathered or whose gradients are reduced; None for none.
        phase: of the step.
        issuer: what issues the ops.
        function: whether the backward of a Python autograd function runs, for whose kernels it is charged.
        policy: whether a policy of selective checkpointing sees them.
        paused: whether ops are not part of the program, such as those of shape propagation.
        issued: number of operations that the host has issued.
    """

    module: str = ""
    unit: str | None = None
    phase: Phase = "setup"
    issuer: Issuer = "python"
    function: bool = False
    policy: bool = False
    paused: bool = False
    issued: int = 0

    def record(self, record: Record) -> None:
        """Take the next record."""

    def call(self, kind: Call, number: int = 1) -> None:
        """Note calls that the host makes; `EACH` is one for each input of the next operation."""

    def take_calls(self, inputs: int = 0) -> Calls:
        """Return the calls since the operation before, for the next one, which has a number of inputs."""
        return ()


class Stream:
    """A queue of kernels, identified by its number."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.stream_id = backend.next_stream()
        self.priority = priority
        self.device = torch.device(SIM, 0)

    def wait_stream(self, other: Stream) -> None:
        """Make later work wait for the work that the other stream has now."""
        backend.record(WaitStream(self.stream_id, other.stream_id))

    def wait_event(self, event: Event) -> None:
        """Make later work wait for the event."""
        backend.record(WaitEvent(self.stream_id, event.number))

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event after the stream's work."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Make the host wait for the stream."""
        backend.record(HostWaitStream(self.stream_id))

    def query(self) -> bool:
        """Return that all work is complete, since no time passes."""
        return True

    def __enter__(self) -> Stream:
        self._outer = backend.current
        backend.current = self
        return self

    def __exit__(self, *_: object) -> None:
        backend.current = self._outer


class Event:
    """A point in a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = backend.next_event()

    def record(self, stream: Stream | None = None) -> None:
        """Mark the point after the stream's earlier work."""
        backend.record(RecordEvent(self.number, (stream or backend.current).stream_id))

    def wait(self, stream: Stream | None = None) -> None:
        """Make later work of the stream wait."""
        backend.record(WaitEvent((stream or backend.current).stream_id, self.number))

    def synchronize(self) -> None:
        """Make the host wait."""
        backend.record(HostWaitEvent(self.number))

    def query(self) -> bool:
        """Return that the event is complete, since no time passes."""
        return True


_Stream: TypeAlias = Stream


class _Sim:
    """The backend module `torch.sim`, with those functions of `torch.cuda` that torch calls."""

    Stream = Stream
    Event = Event

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.streams = self.events = 0
        self.used = False
        """Whether a simulation has begun in this process, or in one from which it was forked."""
        self.single = False
        self.current: _Stream

    def start(self, recorder: Recorder, *, single: bool = False) -> None:
        """Begin a simulation; ``single`` gives every stream the same number, since those of a CPU are no queues."""
        if self.recorder is not None:
            raise SimulationError("a simulation is already running in this process")
        self.recorder = recorder
        self.used = True
        self.streams = self.events = 0
        self.single = single
        self.current = Stream()

    def stop(self) -> None:
        self.recorder = None

    def record(self, record: Record) -> None:
        if self.recorder is not None and not self.recorder.paused:
            self.recorder.record(record)

    def next_stream(self) -> int:
        if self.single:
            return 0
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
        self.record(HostWaitDevice())

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


backend = _Sim()


@functools.cache
def register() -> None:
    """Register the device type with torch; it cannot be unregistered."""
    register_python_backend(SIM, backend_module=backend)


def current_stream() -> int:
    """Return the number of the current stream."""
    return backend.current.stream_id


def read_from_device(size: int) -> None:
    """Record that the host reads bytes of a tensor and waits for them."""
    recorder = backend.recorder
    assert recorder is not None
    where = current_stream()
    backend.record(
        Copy(
            stream=where,
            direction="device_to_host",
            bytes=size,
            blocking=True,
            module=recorder.module,
            phase=recorder.phase,
            issuer=recorder.issuer,
            calls=recorder.take_calls(),
        )
    )
    backend.record(HostWaitStream(where))
