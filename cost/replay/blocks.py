"""Shortening of a model: few of its repeated blocks are captured, and the others are left out.

The blocks of a deep model have the same class, the same shapes and, as lowering states
(:attr:`legoai.lowering.program.Program.block_classes`), the same treatment by the plan and by the model's forward; or
every second one has. Blocks in the middle are left out before the program parallelizes the model. Their ops are then
replayed from those of the captured blocks (:mod:`legoai.cost.replay.piece`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from legoai.cost.replay.repeated_blocks import RepeatedBlocks, Run, runs_of


def shorten(
    model: nn.Module,
    classes: Mapping[str, Sequence[int]],
    *,
    ahead: int = 1,
    staged: bool = False,
    least: int = 1,
) -> list[RepeatedBlocks]:
    """Leave out blocks in the middle of every long run of repeated blocks, in place.

    Args:
        model: on the meta device, not parallelized.
        classes: of the blocks of a container, by its path: blocks of one class get the same treatment.
        ahead: how many blocks away, at most, a block may refer to another, for example to prefetch its parameters.
        staged: whether the model is a stage of a pipeline, whose blocks keep their names in the whole model.
        least: fewest blocks of a container that are worth leaving out; with fewer, none are.

    Returns:
        The runs of which blocks were left out.
    """
    shortened: list[RepeatedBlocks] = []
    for path, container in _outermost(model):
        if path in classes and sum(run.left_out for run in runs_of(classes[path], ahead)) >= least:
            shortened += _shortened(path, container, classes[path], ahead, staged)
    return shortened


def class_of_name(container: nn.Module, classes: Sequence[int]) -> dict[str, int]:
    """Return the class of each block of a whole model's container by its name; empty where their numbers differ."""
    names = [name for name, _ in container.named_children()]
    return dict(zip(names, classes, strict=True)) if len(names) == len(classes) else {}


def classes_of_held(container: nn.Module, classes: Mapping[str, int]) -> list[int]:
    """Return the class of each block that a container (of a stage, say) holds; empty where a block has no class."""
    names = [name for name, _ in container.named_children()]
    return [classes[name] for name in names] if classes.keys() >= set(names) else []


def _shortened(
    path: str, container: nn.ModuleList | nn.ModuleDict, classes: Sequence[int], ahead: int, staged: bool
) -> Iterator[RepeatedBlocks]:
    names = tuple(name for name, _ in container.named_children())
    blocks = list(container.children())
    runs = list(runs_of(classes, ahead)) if len(blocks) == len(classes) else []
    whole = len(runs) == 1 and runs[0].period == 1 and runs[0].groups == len(blocks)
    if not runs or len({id(block) for block in blocks}) != len(blocks):
        return
    if any(parameter is not None for parameter in container._parameters.values()):
        return
    if not all(_is_equal(blocks, run) for run in runs):
        return
    if not whole and (type(container) not in _SHORTENED or (staged and type(container) is nn.ModuleList)):
        return  # programs name the blocks by their indices, which would change
    left_out = {place for run in runs for place in range(run.start, run.stop)} - {p for run in runs for p in run.kept}
    own = {place: name for place, name in enumerate(names) if place not in left_out}
    if whole and not staged and not isinstance(container, nn.ModuleDict):
        own = {place: str(order) for order, place in enumerate(own)}  # a list numbers its own blocks
    container._modules.clear()
    container._modules.update({name: blocks[place] for place, name in own.items()})
    if not whole:
        shortened: Any = _SHORTENED[type(container)]
        container.__class__ = shortened
    for run in runs:
        bounds = (
            "" if run.stop - run.start == len(names) and not staged else f"[{names[run.start]}..{names[run.stop - 1]}]"
        )
        yield RepeatedBlocks(
            prefix=f"{path}." if path else "",
            kept=tuple(own[place] for place in run.kept),
            names=names[run.start : run.stop],
            middle=run.middle,
            period=run.period,
            key=f"{path}{bounds}",
        )


def _is_equal(blocks: Sequence[nn.Module], run: Run) -> bool:
    """Whether every group of a run has blocks equal to those of the first group."""
    return all(
        are_equal(blocks[first], blocks[place], first, place)
        for first in range(run.start, run.start + run.period)
        for place in range(first, run.stop, run.period)
    )


class ShortenedDict(nn.ModuleDict):
    """Container that accepts the names of blocks that were left out: operations on those have no effect."""

    def __getitem__(self, key: str) -> nn.Module:
        """Return a block, or a :class:`LeftOut` for one that was left out."""
        return self._modules[key] if key in self._modules else LeftOut()

    def __setitem__(self, key: str, module: nn.Module) -> None:
        """Replace a block."""
        if key in self._modules:
            super().__setitem__(key, module)


class ShortenedList(nn.ModuleList):
    """Container whose blocks keep their indices: operations on those that were left out have no effect."""

    def __getitem__(self, index: Any) -> Any:
        """Return a block, or a :class:`LeftOut` for one that was left out; negative ones count from the last."""
        if isinstance(index, slice):
            return nn.ModuleList(list(self)[index])
        if index < 0:
            return list(self)[index]
        return self._modules[str(index)] if str(index) in self._modules else LeftOut()

    def __setitem__(self, index: int, module: nn.Module) -> None:
        """Replace a block by a module that wraps it; its index is its own, or that by which it was enumerated."""
        for name, block in self._modules.items():
            if any(block is one for one in module.children()):
                self._modules[name] = module


_SHORTENED: Final[Mapping[type[nn.Module], type[nn.Module]]] = {
    nn.ModuleDict: ShortenedDict,
    nn.ModuleList: ShortenedList,
}


class LeftOut(nn.Module):
    """Module in the place of one that was left out, and of all modules in it."""

    def __getattr__(self, name: str) -> Any:
        """Return such a module for a submodule; attributes of torch are missing, as in any other module."""
        return super().__getattr__(name) if name.startswith("_") else LeftOut()


def _outermost(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList | nn.ModuleDict]]:
    """Yield the containers of blocks that are not nested in another one."""
    inside: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and not any(path.startswith(outer) for outer in inside):
            inside.append(f"{path}.")
            yield path, module


def are_equal(first: nn.Module, second: nn.Module, place: int, other: int) -> bool:
    """Whether two blocks are equal, apart from attributes that hold each block's own index."""
    ours, theirs = list(first.named_modules()), list(second.named_modules())
    return len(ours) == len(theirs) and all(
        path == their_path and _are_equal_alone(mine, their, place, other)
        for (path, mine), (their_path, their) in zip(ours, theirs, strict=True)
    )


def _are_equal_alone(first: nn.Module, second: nn.Module, place: int, other: int) -> bool:
    """Whether two modules are equal, apart from their submodules."""
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
    """Whether two attributes are equal; tensors are compared by metadata."""
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return value.shape == other.shape and value.dtype == other.dtype and value.device == other.device
    if type(value) is not type(other):
        return False
    try:
        return bool(value == other)
    except (RuntimeError, TypeError, ValueError):
        return False
