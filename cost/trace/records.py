"""Records of one rank's trace: kernels, collectives, synchronisation, allocations and marks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

from legoai.cost.trace.pickling import pickled_by_position

Phase = Literal["setup", "forward", "backward", "recompute", "optimizer", "other"]
"""`recompute` is a forward that runs again within a backward; `setup` is everything before the first step."""

CollectiveKind = Literal[
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "permute",
    "broadcast",
    "send",
    "receive",
    "peer_copy",
    "barrier",
]
"""In a `permute` each rank sends all of its buffer to one other, and receives as much from one, as in a ring.
`peer_copy` is a read of another rank's memory by this rank's copy engine; the other rank issues nothing."""

POINT_TO_POINT: Final[tuple[CollectiveKind, ...]] = ("send", "receive")

Category = Literal[
    "parameter",
    "sharded_parameter",
    "unsharded_parameter",
    "gradient",
    "sharded_gradient",
    "unsharded_gradient",
    "activation",
    "temporary",
    "optimizer_state",
    "input",
    "communication",
    "other",
]
"""What a storage holds. `temporary` is a gradient of an activation, or other memory of a backward alone."""

LOSS: Final = "loss"
"""The module of ops on the model's output, and of their backward, which belong to no module."""

PART_OF: Final = "part of"
"""The attribute of kernels that the host launches for one operator, which it names."""

UNDER_POLICY: Final = "policy"
"""The attribute of kernels that a policy of selective checkpointing sees, in forward and where they run again."""

CopyDirection = Literal["host_to_device", "device_to_host", "device_to_device"]

Issuer = Literal["node", "python", "function"]
"""`node` is code in C++, as of autograd's nodes and compiled graphs; `function` is the backward of a Python autograd
function, and `python` all other Python code, as of modules and hooks."""

Call = Literal[
    "function",
    "function backward",
    "dtensor",
    "listed dtensor",
    "conversion",
    "conversion backward",
    "functional collective",
    "unit",
    "gather",
    "gathered parameter",
    "reduction",
    "reduced parameter",
]
"""Work of the host beside issuing operations.

`function` is a Python autograd function that issues nothing, `dtensor` an operator on DTensors, of whose lists each
tensor is a `listed dtensor`, and `conversion` an autograd function that converts or redistributes one. `unit` is a
forward of an FSDP unit, `gather` and `reduction` are of its parameters and gradients, each of which adds to them.
"""

CALLS: Final[tuple[Call, ...]] = get_args(Call)

EACH: Final = -1
"""As many calls as the kernel has inputs, whose number depends on that of the blocks."""

Calls: TypeAlias = tuple[tuple[Call, int], ...]
"""Numbers of calls by kind, or :data:`EACH`."""


@pickled_by_position
@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and dtype of a local tensor; ``dtype`` as torch names it without its module (`bfloat16`)."""

    shape: tuple[int, ...]
    dtype: str


@pickled_by_position
@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel of one stream.

    Attributes:
        stream: the stream on which it was launched; 0 is the default stream.
        op: the operator, `aten.mm`, or for a fused group `fused(aten.mul, aten.add)`.
        inputs: its tensor arguments, in order.
        outputs: its newly allocated outputs.
        flops: floating-point operations, two for a multiply-add.
        bytes_read: bytes of inputs that it must read once.
        bytes_written: bytes of outputs that it must write once.
        attributes: anything else that its time depends on, such as `causal`.
        module: path of the innermost module, as in `named_modules()`.
        phase: of the step.
        issuer: what issues it.
        calls: that the host made since the operation before.
    """

    stream: int
    op: str
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    flops: int
    bytes_read: int
    bytes_written: int
    attributes: Mapping[str, Any]
    module: str
    phase: Phase
    issuer: Issuer = "node"
    calls: Calls = ()


@pickled_by_position
@dataclass(frozen=True, slots=True, kw_only=True)
class HostKernel:
    """One operator on tensors in host memory, which the host computes itself, synchronously.

    Its fields are those of a :class:`Kernel`, apart from the stream, ``issuer`` and ``calls``.
    """

    op: str
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    flops: int
    bytes_read: int
    bytes_written: int
    attributes: Mapping[str, Any]
    module: str
    phase: Phase


@pickled_by_position
@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective or point-to-point transfer.

    Attributes:
        work: its number, which a :class:`WaitWork` names.
        stream: the stream whose earlier work it follows; it runs on the communicator's own queue.
        kind: of the collective.
        ranks: global ranks of its group, in the group's order; for `send`, `receive` and `peer_copy` the two ends,
            sender first.
        axis: the mesh axes of the group as the program names them, joined by `+`; empty where they are unknown.
        bytes: the size of the *whole* buffer: the gathered output of an all-gather, the input of a reduce-scatter, the
            buffer of an all-reduce, broadcast, send or receive, the local input of an all-to-all.
        dtype: of the elements.
        module: path of the module for which it runs.
        phase: of the step.
        issuer: as of a :class:`Kernel`.
        calls: as of a :class:`Kernel`.
        communicator: name of the group's communicator, where `axis` does not name it: several groups may have the same
            ranks, and one group may serve several axes.
        members: of a send or receive in a batch, the global ranks of its group, whose communicator runs it; otherwise
            empty.
        of_parameters: whether it gathers parameters or reduces gradients, as `fsdp` and `replicate` do.
    """

    work: int
    stream: int
    kind: CollectiveKind
    ranks: tuple[int, ...]
    axis: str
    bytes: int
    dtype: str
    module: str
    phase: Phase
    issuer: Issuer = "node"
    calls: Calls = ()
    communicator: str = ""
    members: tuple[int, ...] = ()
    of_parameters: bool = False


@pickled_by_position
@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A copy between host and device, or within the device by the copy engine.

    ``issuer`` and ``calls`` are as of a kernel.
    """

    stream: int
    direction: CopyDirection
    bytes: int
    blocking: bool
    module: str
    phase: Phase
    issuer: Issuer = "node"
    calls: Calls = ()


@pickled_by_position
@dataclass(frozen=True, slots=True)
class RecordEvent:
    """`event.record(stream)`: the event is complete when all earlier work of the stream is."""

    event: int
    stream: int


@pickled_by_position
@dataclass(frozen=True, slots=True)
class WaitEvent:
    """`stream.wait_event(event)`: later work of the stream waits for the event's latest record before this."""

    stream: int
    event: int


@pickled_by_position
@dataclass(frozen=True, slots=True)
class WaitStream:
    """`stream.wait_stream(other)`: later work of the stream waits for all earlier work of the other."""

    stream: int
    other: int


@pickled_by_position
@dataclass(frozen=True, slots=True)
class WaitWork:
    """`work.wait()` and `wait_tensor`: later work of the current stream waits for the collective; the host does not."""

    stream: int
    work: int


@pickled_by_position
@dataclass(frozen=True, slots=True)
class HostWaitEvent:
    """`event.synchronize()`: the host waits."""

    event: int


@pickled_by_position
@dataclass(frozen=True, slots=True)
class HostWaitStream:
    """`stream.synchronize()`, and a copy to the host that blocks: the host waits."""

    stream: int


@dataclass(frozen=True, slots=True)
class HostWaitDevice:
    """`synchronize()`: the host waits for all streams."""


@pickled_by_position
@dataclass(frozen=True, slots=True, kw_only=True)
class Allocate:
    """A storage of ``bytes`` bytes is allocated on ``stream``."""

    storage: int
    bytes: int
    stream: int
    category: Category
    module: str
    phase: Phase


@pickled_by_position
@dataclass(frozen=True, slots=True)
class Categorise:
    """The final category of a storage becomes known, for example when a buffer becomes `.grad`."""

    storage: int
    category: Category
    module: str


@pickled_by_position
@dataclass(frozen=True, slots=True)
class Resize:
    """A storage is resized in place, on ``stream``; FSDP frees and reallocates unsharded parameters in this way."""

    storage: int
    bytes: int
    stream: int = 0


@pickled_by_position
@dataclass(frozen=True, slots=True)
class Free:
    """The last reference to a storage is gone."""

    storage: int


@pickled_by_position
@dataclass(frozen=True, slots=True)
class Mark:
    """A named point of the program: `step 1`, `forward layers.3`, `end layers.3`, `micro batch 0`."""

    name: str


Record: TypeAlias = (
    Kernel
    | HostKernel
    | Collective
    | Copy
    | RecordEvent
    | WaitEvent
    | WaitStream
    | WaitWork
    | HostWaitEvent
    | HostWaitStream
    | HostWaitDevice
    | Allocate
    | Categorise
    | Resize
    | Free
    | Mark
)

RECORDS: Final = {
    record.__name__: record
    for record in (
        Kernel, HostKernel, Collective, Copy, RecordEvent, WaitEvent, WaitStream, WaitWork, HostWaitEvent,
        HostWaitStream, HostWaitDevice, Allocate, Categorise, Resize, Free, Mark,
    )
}  # fmt: skip
