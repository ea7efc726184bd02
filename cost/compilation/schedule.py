"""Schedule of a compiled graph: its kernels in order, and the lifetime of each buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from legoai.cost.trace.records import TensorType
from legoai.runtime.torch_internals.operators import OpOverload

MODULE: Final = "legoai module"
"""The key of a node's custom metadata that names its module, relative to the compiled one."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor: elements of a buffer."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Given:
    """An argument that is no tensor, such as a process group."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One kernel, like :class:`legoai.cost.trace.records.Kernel`; ``module`` is relative to the compiled one."""

    op: str
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    flops: int
    bytes_read: int
    bytes_written: int
    attributes: dict[str, Any]
    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of an operator that is not compiled: a collective, the wait for one, or products group by group.

    ``result`` names its output; None where it works in place.
    """

    function: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: str | None
    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Chunked products that overlap a collective, by :mod:`legoai.cost.compilation.async_tp`.

    Attributes:
        group: name of the process group.
        gathers: whether an all-gather precedes the products; otherwise a reduce-scatter follows them.
        piece: the chunk that is copied from each peer.
        products: of one chunk.
        first: the copy of the rank's own chunk to where peers read it.
        last: the sum of the chunks that arrived.
        kept: whether the gathered tensor is an output.
        temporary: tensor that is allocated, and freed at the end.
        module: relative to the compiled one.
    """

    group: str
    gathers: bool
    piece: TensorType
    products: tuple[Work, ...]
    first: Work | None
    last: Work | None
    kept: bool
    temporary: Slot | None
    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of the schedule.

    Attributes:
        makes: buffers that are allocated.
        aliases: (new, old): buffers that reuse the memory of others.
        work: a kernel, a call of an operator, chunked products, or nothing.
        drops: buffers that are freed.
    """

    makes: tuple[Slot, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    work: Work | Call | Pieces | None = None
    drops: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A compiled graph.

    Attributes:
        inputs: names of its arguments, in order.
        steps: in the order in which they are run.
        outputs: its results, in order: tensors, arguments, and constants as they are.
    """

    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Any, ...]
