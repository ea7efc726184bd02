"""Selective checkpointing: saved outputs that became invalid, and other operators in recomputation than in forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch.utils.checkpoint

from legoai.runtime.torch_internals.operators import OpOverload, TorchDispatchMode

_MISSING: Final = ("encountered during backward", "not found in storage")
"""Parts of torch's error for an operator that ran in recomputation but not in forward, around the invocation index."""

_RECOMPUTE: Final = getattr(torch.utils.checkpoint, "_RECOMPUTE", None)
"""Entry of torch's storage for an output that is not saved; torch 2.12 has none, and asks the policy again."""


@dataclass(frozen=True, slots=True)
class SavedOutputs:
    """Outputs in torch's storage of one call of a module.

    It does not refer to the context, which refers to the policy: a cycle would keep the outputs until Python collects
    garbage.

    Attributes:
        storage: of the outputs, by operator and invocation.
        invocations: of each operator so far.
    """

    storage: dict[Any, dict[int, Any]]
    invocations: Mapping[Any, int]

    SUPPORTED: ClassVar = _RECOMPUTE is not None

    @classmethod
    def of(cls, forward: Any) -> SavedOutputs:
        """Return those of the first of `create_selective_checkpoint_contexts`."""
        return cls(forward.storage, forward.func_counter)

    def last(self, operator: OpOverload) -> tuple[OpOverload, int]:
        """Return the operator and the invocation for which torch asks the policy now."""
        return operator, self.invocations[operator] - 1

    def recompute(self, operator: OpOverload, invocation: int) -> None:
        """Let recomputation compute an output again, as if it had never been saved."""
        self.storage[operator][invocation] = _RECOMPUTE


class _Recomputing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls torch's own mode for each operator; its class is only known to be a mode."""

    supports_higher_order_operators = True

    def __init__(self, recomputation: TorchDispatchMode, keeps: Callable[[OpOverload], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recomputation = recomputation
        self.keeps = keeps

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        with self.recomputation:  # which counts the invocations of an operator from its entry on
            pass
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            return self.recomputation.__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if self.keeps(func) or not all(part in str(error) for part in _MISSING):
                raise
            return func(*args, **kwargs)


def recompute_freely(recomputation: TorchDispatchMode, keeps: Callable[[OpOverload], bool]) -> TorchDispatchMode:
    """Allow recomputation to run operators that forward did not run, where their outputs are not saved anyway.

    `fully_shard` gathers parameters in forward and in recomputation by different operators, especially in a group of
    one rank, and torch takes each of them for a part of the model that has changed.

    Args:
        recomputation: the second of `create_selective_checkpoint_contexts`.
        keeps: whether outputs of an operator may have been saved.
    """
    return _Recomputing(recomputation, keeps)
