"""Record of the operators of a forward: their names and constants, by the modules that compute them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from legoai.specs.models.torch_internals import OperatorMode, tree_leaves

_OF_NUMBERS: Final = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor})
"""Functions that make a tensor of Python's numbers, by no operator."""


class Operator(NamedTuple):
    """One operator of a forward."""

    owner: str | None
    """What computes it, as the record was told."""
    name: str
    constants: tuple[str, ...]
    """Its arguments but tensors."""


class Dispatched(ExitStack):
    """Operators that are dispatched while entered, in order.

    Args:
        owner: called for what computes an operator.
    """

    def __init__(self, owner: Callable[[], str | None]) -> None:
        super().__init__()
        self.operators: list[Operator] = []
        self._owner = owner

    def __enter__(self) -> Dispatched:
        super().__enter__()
        self.enter_context(_Numbers(self._note))
        self.enter_context(_Operators(self._note))
        return self

    def _note(self, func: Any, given: Any) -> None:
        constants = (repr(leaf) for leaf in tree_leaves(given) if not isinstance(leaf, torch.Tensor))
        self.operators.append(Operator(self._owner(), str(func), tuple(constants)))


class _Operators(OperatorMode):
    def __init__(self, note: Callable[[Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute an operator."""
        self._note(func, (args, kwargs))
        return func(*args, **(kwargs or {}))


class _Numbers(TorchFunctionMode):
    def __init__(self, note: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute a torch function."""
        if func in _OF_NUMBERS:
            self._note(func.__name__, (args, kwargs))
        return func(*args, **(kwargs or {}))


def first_difference(own: list[Operator], other: list[Operator], owners: Collection[str]) -> int | None:
    """Return where the operators of a forward begin to differ from those of another; None where they are equal.

    Args:
        own: of the forward.
        other: of the other forward.
        owners: whose operators are not compared.
    """
    indices = [index for index, item in enumerate(own) if item.owner not in owners]
    others = [item for item in other if item.owner not in owners]
    for index, item in zip_longest(indices, others):
        if index is None or item is None or own[index] != item:
            return len(own) if index is None else index
    return None
