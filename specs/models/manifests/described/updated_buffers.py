"""Buffers of a model's state that its forward changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from legoai.specs.models.torch_internals import OperatorMode, OpOverload, times_changed

_STATISTICS: Final = ("running_mean", "running_var")


class UpdatedBuffers:
    """While entered, watches a forward; afterwards, :attr:`names` are the saved buffers that it changed.

    Other buffers are tables, of which a forward may compute more.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names: list[str] = []
        self._model = model
        self._before: dict[str, tuple[torch.Tensor, int]] = {}
        self._statistics: set[int] = set()
        self._operators = _BatchNorms(lambda tensor: self._statistics.add(id(tensor)))

    def __enter__(self) -> UpdatedBuffers:
        self._before = _saved(self._model)
        self._operators.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        self._operators.__exit__(*exception)  # type: ignore[no-untyped-call]
        self.names = [name for name, state in _saved(self._model).items() if self._changed(name, *state)]

    def _changed(self, name: str, buffer: torch.Tensor, times: int) -> bool:
        """Whether a buffer was changed in place, or replaced by another tensor."""
        if name not in self._before:
            return False
        before, times_before = self._before[name]
        return before is not buffer or times_before != times or id(buffer) in self._statistics


class _BatchNorms(OperatorMode):
    """Calls a function, while active, for each running statistic that batch normalisation updates.

    Its kernels update them beside their results, without counting it as a change of the tensor.
    """

    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute an operator."""
        kwargs = kwargs or {}
        if isinstance(func, OpOverload) and "batch_norm" in func._schema.name:
            for statistic in _updated_by(func, args, kwargs):
                self._note(statistic)
        return func(*args, **kwargs)


def _updated_by(operator: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the running statistics that batch normalisation changes: those that it gets in training."""
    names = (parameter.name for parameter in operator._schema.arguments)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("training"):
        yield from (given[name] for name in _STATISTICS if isinstance(given.get(name), torch.Tensor))


def _saved(model: nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    """Return the buffers of the model's state, each with how often it was changed in place."""
    saved = model.state_dict(keep_vars=True)
    buffers = model.named_buffers(remove_duplicate=False)
    return {name: (buffer, times_changed(buffer)) for name, buffer in buffers if name in saved}
