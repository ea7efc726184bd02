"""Repeated blocks of a model, a few of which stand for all.

A deep model repeats: its blocks have the same class, the same shapes and, as lowering states
(:attr:`legoai.lowering.program.Program.repeated_blocks`), the same treatment. Blocks in the middle are left out before
the program parallelizes the model, and their part of the trace is replayed from that of a block that was captured
(:mod:`legoai.cost.replay.piece`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Final

import torch
from torch import nn

from legoai.cost.replay.repeated_blocks import TAKEN, RepeatedBlocks

_MIDDLE: Final = 2


def shorten(model: nn.Module, containers: Collection[str]) -> list[RepeatedBlocks]:
    """Leave out blocks in the middle of every long container of equal ones, in place.

    Args:
        model: on the meta device, not parallelized.
        containers: paths of those containers whose blocks the program treats equally.

    Returns:
        The containers of which blocks were left out.
    """
    shortened = []
    for path, container in _outermost(model):
        if path not in containers:
            continue
        names = tuple(name for name, _ in container.named_children())
        blocks = list(container.children())
        if len(blocks) <= TAKEN or len({id(block) for block in blocks}) != len(blocks):
            continue
        if any(parameter is not None for parameter in container._parameters.values()):
            continue
        if any(not are_equal(blocks[0], block, 0, place) for place, block in enumerate(blocks)):
            continue
        places = [*range(_MIDDLE + 1), *range(len(blocks) - (TAKEN - _MIDDLE - 1), len(blocks))]
        kept = {_name(container, names[place], order): blocks[place] for order, place in enumerate(places)}
        container._modules.clear()
        container._modules.update(kept)
        shortened.append(
            RepeatedBlocks(prefix=f"{path}." if path else "", kept=tuple(kept), names=names, middle=_MIDDLE)
        )
    return shortened


def _name(container: nn.Module, name: str, order: int) -> str:
    """Return what a block is called in a shortened container; a list counts its own."""
    return name if isinstance(container, nn.ModuleDict) else str(order)


def _outermost(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList | nn.ModuleDict]]:
    """Yield the containers of blocks that are in no other one."""
    inside: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and not any(path.startswith(outer) for outer in inside):
            inside.append(f"{path}.")
            yield path, module


def are_equal(first: nn.Module, second: nn.Module, place: int, other: int) -> bool:
    """Whether two blocks do the same; that each knows its own place in the container counts as nothing."""
    ours, theirs = list(first.named_modules()), list(second.named_modules())
    return len(ours) == len(theirs) and all(
        path == their_path and _are_equal_alone(mine, their, place, other)
        for (path, mine), (their_path, their) in zip(ours, theirs, strict=True)
    )


def _are_equal_alone(first: nn.Module, second: nn.Module, place: int, other: int) -> bool:
    """Whether two modules do the same, but for the modules in them."""
    if type(first) is not type(second) or _tensors(first) != _tensors(second):
        return False
    if first._forward_hooks or first._forward_pre_hooks or second._forward_hooks or second._forward_pre_hooks:
        return False
    ours, theirs = _attributes(first), _attributes(second)
    return ours.keys() == theirs.keys() and all(
        value is theirs[name] or _is_place(value, place, theirs[name], other) or _equal(value, theirs[name])
        for name, value in ours.items()
    )


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


def _tensors(module: nn.Module) -> list[object]:
    return [
        None if tensor is None else (name, tensor.shape, tensor.dtype, tensor.requires_grad)
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
    ]


def _is_place(value: object, place: int, others: object, other: int) -> bool:
    return type(value) is type(others) is int and value == place and others == other


def _equal(value: object, other: object) -> bool:
    """Whether two attributes are equal; tensors are so if they look the same."""
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return value.shape == other.shape and value.dtype == other.dtype and value.device == other.device
    if type(value) is not type(other):
        return False
    try:
        return bool(value == other)
    except (RuntimeError, TypeError, ValueError):
        return False
