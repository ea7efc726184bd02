"""Schedule of a compiled graph: its kernels in their order, and the lifetime of each buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from legoai.cost.trace.records import TensorType
from legoai.runtime.torch_internals.operators import OpOverload

MODULE: Final = "legoai module"
"""The key of a node's custom metadata that names the module, below the compiled one, on whose behalf it works."""


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
    """One kernel, as :class:`legoai.cost.trace.records.Kernel` has it; ``module`` is below the compiled one."""

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
    """An operator that is called as it is: a collective, or the wait for one, or products group by group.

    ``result`` names what it returns; None where it works in place.
    """

    function: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: str | None
    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Products in pieces beside the collective that they need or feed, by :mod:`legoai.cost.compilation.async_tp`.

    Attributes:
        group: name of the process group.
        gathers: whether an all-gather feeds the products; else their result is reduced and scattered.
        piece: what is copied from each peer.
        products: of one piece.
        first: the copy of the rank's own piece to where peers read it.
        last: the sum of the pieces that came.
        kept: whether what is gathered is a result.
        temporary: what is made, and dropped at the end.
        module: below the compiled one.
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
    """What happens in one place of the schedule.

    Attributes:
        makes: buffers that are allocated.
        aliases: (new, old): buffers that lie in the memory of others.
        work: a kernel, a call of an operator, products in pieces, or nothing.
        drops: buffers that are needed no more.
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
