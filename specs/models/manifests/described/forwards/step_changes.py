"""Differences between the steps of a training, which one traced graph of a step would not have."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from legoai.specs.models.manifests.described.forwards.drawn_on_host import states_of_generators
from legoai.specs.models.manifests.described.forwards.restored import attributes_restored
from legoai.specs.models.manifests.described.recorders.dispatched import Dispatched, Operator, first_difference
from legoai.specs.models.random_operators import RandomOperators
from legoai.specs.models.torch_internals import as_if_traced, is_transformed, tree_leaves

_OF_EVERY_MODULE: Final = frozenset(vars(nn.Module()))


def step_changes(model: nn.Module, inputs: tuple[Any, ...]) -> str | None:
    """Return what differs between the steps of a model's training, or why a step has no gradient; None if nothing does.

    A graph that is traced once repeats the operators of its step, with the numbers that Python computed for them then.

    Args:
        model: on the meta device, whose forward is known to succeed.
        inputs: of the forward.
    """
    with attributes_restored(model):
        try:
            before = states_of_generators()
            first = _step(model, inputs)
            if states_of_generators() != before:
                return "forward draws random numbers on the host, and each step of a graph would use the first ones"
            if first.without:
                return f"no gradient reaches `{first.without[0]}`, and every trained parameter of a graph has one"
            if first.draws_again:
                return "it recomputes modules that draw random numbers, which would draw others in a graph"
            left = _left_by(model)
            second = _step(model, inputs)
        except Exception as error:
            return f"it cannot be traced: {textwrap.shorten(str(error), 150, placeholder=' …')}"
        changed = [name for name, value in _left_by(model).items() if left.get(name, _NOTHING) != value]
    if changed:
        return f"each forward sets `{changed[0]}` anew, which a graph does not"
    at = first_difference(second.operators, first.operators, ())
    if at is not None:
        name = (second.operators if at < len(second.operators) else first.operators)[at].name
        return f"its second step has other operators than its first, from `{name}` on"
    return None


_NOTHING: Final = object()


class _Step(NamedTuple):
    operators: list[Operator]
    without: list[str]
    """Parameters that get no gradient."""
    draws_again: bool
    """Whether backward draws random numbers."""


def _step(model: nn.Module, inputs: tuple[Any, ...]) -> _Step:
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    dispatched, drawn = Dispatched(lambda: None), list[None]()
    with torch.enable_grad(), as_if_traced(), _no_transforms(model), dispatched:
        result = model(*inputs)
        with RandomOperators(lambda: drawn.append(None)):
            gradients = torch.autograd.grad(result, list(names), torch.empty_like(result), allow_unused=True)
    without = [name for name, gradient in zip(names.values(), gradients, strict=True) if gradient is None]
    return _Step(dispatched.operators, without, bool(drawn))


@contextmanager
def _no_transforms(model: nn.Module) -> Iterator[None]:
    """Raise `ValueError` where a module gathers its parameters within a transform of `torch.func`, as `vmap` is."""

    def check(module: nn.Module, args: tuple[Any, ...]) -> None:
        if next(module.parameters(), None) is not None and any(
            isinstance(leaf, torch.Tensor) and is_transformed(leaf) for leaf in tree_leaves(args)
        ):
            raise ValueError(f"a transform of `torch.func` calls a `{type(module).__name__}` with parameters")

    handles = [module.register_forward_pre_hook(check) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _left_by(model: nn.Module) -> Mapping[str, Any]:
    """Attributes of modules as a forward leaves them: plain values, which tensor, and the lengths of collections."""
    return {
        f"{path}.{name}" if path else name: _told(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _OF_EVERY_MODULE
    }


def _told(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.Tensor, id(value), value  # which lives, so that no other has its id
    if isinstance(value, Collection) and not isinstance(value, str | bytes):
        return type(value), len(value)
    return value if isinstance(value, int | float | str | bytes | bool) or value is None else type(value)
