"""Operands of a kernel: the storages of its tensors, and the traffic of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from legoai.cost.simulated.operators.properties import Operator, overwrites, size_of, tensors
from legoai.cost.trace.editing import Operands
from legoai.cost.trace.numbers import NONE, encoded


class Shares(NamedTuple):
    """Traffic of a call's tensors: the fields of `Operands` that do not name storages."""

    read: tuple[int, ...]
    written: tuple[int, ...]
    new: tuple[int, ...]
    whole: bool


def shares_of(  # noqa: PLR0917
    known: Operator,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[torch.Tensor],
    fresh: Sequence[torch.Tensor],
    traffic: tuple[int, int],
) -> Shares:
    """Return the traffic of each tensor of a call.

    Args:
        known: the operator.
        args: of the call.
        kwargs: of the call.
        inputs: all tensors of the device among them, in order.
        fresh: newly allocated outputs.
        traffic: bytes that the call reads and writes in total.
    """
    written = {
        id(item)
        for key in known.written
        for item in tensors(kwargs.get(key) if isinstance(key, str) else args[key] if key < len(args) else None)
    }
    over = overwrites(known)
    sizes = [size_of(item) for item in inputs]
    read = tuple(0 if over and id(item) in written else size for item, size in zip(inputs, sizes, strict=True))
    wrote = tuple(size if id(item) in written else 0 for item, size in zip(inputs, sizes, strict=True))
    new = tuple(item.numel() * item.itemsize for item in fresh)
    return Shares(read, wrote, new, traffic == (sum(read), sum(wrote) + sum(new)))


def operands_of(
    shares: Shares,
    inputs: Sequence[torch.Tensor],
    fresh: Sequence[torch.Tensor],
    number_of: Callable[[torch.Tensor], int | None],
) -> Operands:
    """Return the operands of a call.

    Args:
        shares: traffic of its tensors.
        inputs: all tensors of the device among its arguments, in order.
        fresh: newly allocated outputs.
        number_of: returns the number of a tensor's storage.
    """
    return Operands(
        inputs=tuple([_encoded(number_of(item)) for item in inputs]),
        outputs=tuple([_encoded(number_of(item)) for item in fresh]),
        read=shares.read,
        written=shares.written,
        new=shares.new,
        whole=shares.whole,
    )


def _encoded(number: int | None) -> int:
    return NONE if number is None else encoded("storage", number)
