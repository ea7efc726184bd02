"""The private context in which selective checkpointing computes again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

from torch.utils.checkpoint import _CachedTorchDispatchMode

from legoai.runtime.torch_internals.operators import OpOverload

_MISSING: Final = ("encountered during backward", "not found in storage")
"""What torch says of an operator that ran in recomputation and not in forward; in between, which invocation it was."""


class _Recomputing(_CachedTorchDispatchMode):
    keeps: Callable[[OpOverload], bool]

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if self.keeps(func) or not all(part in str(error) for part in _MISSING):
                raise
            return func(*args, **kwargs)


def recompute_freely(context: AbstractContextManager[Any], keeps: Callable[[OpOverload], bool]) -> Any:
    """Let recomputation run operators that forward did not run, where their outputs are not kept anyway.

    `fully_shard` gathers parameters in forward and in recomputation by different operators, above all in a group of one
    rank, and torch takes each of them for a part of the model that has changed.

    Args:
        context: the second of `create_selective_checkpoint_contexts`.
        keeps: whether outputs of an operator may have been kept.
    """
    lenient = _Recomputing.__new__(_Recomputing)
    lenient.__dict__.update(context.__dict__)
    lenient.keeps = keeps
    return lenient
