"""Which blocks of a model are equal, so that a few of them stand for all?

A deep model repeats: its blocks have the same class, the same shapes and the same treatment. Blocks in the middle of
such a run are left out before the program parallelizes the model, and their part of the trace is written afterwards,
from that of a block which was taken (:mod:`legoai.cost.replay.depth`).
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

TAKEN: Final = 5
"""Blocks of a run that are taken: the first and the last, whose neighbours are none, and three that are compared."""
_MIDDLE: Final = 2

_AHEAD: Final = 3
"""The largest number in a slice, which names the units that one gathers ahead: two behind it, up to the third."""

_TELLING: Final = frozenset(
    {
        "endswith", "get_submodule", "index", "int", "islice", "len", "named_modules", "range", "sorted", "startswith",
        "zip",
    }
)  # fmt: skip
"""Calls by which a program may tell blocks apart by their place."""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Equal blocks of one container, some of which were left out.

    Attributes:
        prefix: of the paths of the blocks, such as `layers.`.
        kept: what the blocks that were taken are called in the container.
        names: what all blocks are called in the whole model.
        middle: the place among those kept of the block that is repeated; those before and behind it are equal to it.
    """

    prefix: str
    kept: tuple[str, ...]
    names: tuple[str, ...]
    middle: int

    @property
    def missing(self) -> int:
        """How many blocks were left out."""
        return len(self.names) - len(self.kept)


def treats_alike(program: str) -> bool:
    """Whether a lowered program does to every block what it does to the others, whichever place it has.

    That is so if it goes over whole containers and names no block: it has no numbered element, no range, no
    comparison, and its slices keep within three elements of an end. What a program does before it has a model, such as
    the configuration, does not count.
    """
    try:
        tree = ast.parse(program)
    except SyntaxError:
        return False
    functions = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name not in _BEFORE_BLOCKS
    ]
    return all(_is_blind(node) for function in functions for node in ast.walk(function))


_BEFORE_BLOCKS: Final = frozenset(
    {"build_lr_scheduler", "build_mesh", "build_model", "build_optimizer", "build_stage", "trainer"}
)


def _is_blind(node: ast.AST) -> bool:
    """Whether a piece of a program cannot tell one block from another."""
    match node:
        case ast.Compare(ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return True
        case ast.If(test=test) | ast.IfExp(test=test):
            return isinstance(test, ast.Compare)
        case ast.Compare() | ast.While() | ast.BoolOp():
            return False
        case ast.Call(func=ast.Name(id=name)):
            return name not in _TELLING
        case ast.Call(func=ast.Attribute(attr=name)):
            return name not in _TELLING
        case ast.Constant(value=str(value)):
            return not any(part.isdigit() for part in value.split("."))
        case ast.For(iter=ast.Tuple(elts=items) | ast.List(elts=items)):
            return not any(isinstance(item, ast.Constant) for item in items)
        case ast.Subscript(slice=ast.Constant(value=value)):
            return isinstance(value, str)
        case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper)):
            return all(_is_near(bound) for bound in (lower, upper))
    return True


def _is_near(bound: ast.expr | None) -> bool:
    """Whether the bound of a slice is within three elements of an end, or of the element at hand."""
    if bound is None:
        return True
    return all(
        not isinstance(node, ast.Constant) or (isinstance(node.value, int) and abs(node.value) <= _AHEAD)
        for node in ast.walk(bound)
    )


def shorten(model: nn.Module) -> list[Run]:
    """Leave out blocks in the middle of every long run of equal ones, in place.

    Args:
        model: on the meta device, not parallelized.

    Returns:
        What was left out.
    """
    runs = []
    for path, container in _outermost(model):
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
        runs.append(Run(prefix=f"{path}." if path else "", kept=tuple(kept), names=names, middle=_MIDDLE))
    return runs


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
