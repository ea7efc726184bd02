"""Buffers that a model's forward updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from legoai.specs.models.manifests.described.recorders.functions import takes_only_shape, tensors_in
from legoai.specs.models.manifests.described.recorders.in_place import written
from legoai.specs.models.torch_internals import OperatorMode, OpOverload, storage_of

_STATISTICS: Final = ("running_mean", "running_var")
_INPUTS: Final = ""
"""Source of values that depend on the inputs of forward; other sources are names of buffers, and these sums."""
_ADDING: Final = frozenset({"add", "add_", "sub", "sub_"})
_OVERWRITING: Final = frozenset({"copy_", "fill_", "zero_"})


@dataclass(frozen=True, slots=True)
class _SumWith:
    """Source of values to which a buffer's were added."""

    buffer: str


class UpdatedBuffers:
    """Watches a forward while entered; afterwards, :attr:`names` are the buffers that it updated.

    A saved buffer is updated where it is changed or replaced. Others may be tables, of which a forward computes more:
    one is updated where it is changed by values that depend on the inputs, where it is replaced by such that depend on
    its own too, or where something is added to it, as to a counter.

    Tensors are kept alive until it is deleted, so that their storages stay distinct: watch on the meta device.

    Args:
        model: of the forward.
        inputs: its arguments.

    Attributes:
        names: of the updated buffers.
        unsaved: those of them that the model's state does not contain.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[Any]) -> None:
        self.names: list[str] = []
        self.unsaved: list[str] = []
        self._model = model
        self._saved = set(model.state_dict(keep_vars=True))
        self._before = dict(model.named_buffers(remove_duplicate=False))
        self._storages = {name: storage_of(buffer) for name, buffer in self._before.items()}
        saved = {storage for name, storage in self._storages.items() if name in self._saved}
        self._tables = {storage: name for name, storage in self._storages.items() if storage not in saved}
        self._operators = _Sources(self._tables, inputs)
        self._kept = [buffer.detach() for buffer in self._before.values()]  # its own may be set to another storage

    def __enter__(self) -> UpdatedBuffers:
        self._operators.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        self._operators.__exit__(*exception)  # type: ignore[no-untyped-call]
        buffers = self._model.named_buffers(remove_duplicate=False)
        found = [(name, buffer) for name, buffer in buffers if name in self._before]
        tables = set(self._tables.values())
        self.unsaved = [name for name, buffer in found if name in tables and self._is_state(name, buffer)]
        changed = {name for name, buffer in found if name in self._saved and self._differs(name, buffer)}
        self.names = [name for name, _ in found if name in changed or name in self.unsaved]

    def _differs(self, name: str, buffer: torch.Tensor) -> bool:
        """Whether a buffer was changed in place, or replaced by another tensor."""
        storage = storage_of(buffer)
        return buffer is not self._before[name] or storage != self._storages[name] or storage in self._operators.written

    def _is_state(self, name: str, buffer: torch.Tensor) -> bool:
        """Whether a buffer has values now that it does not have again after other inputs."""
        storage = storage_of(buffer)
        sources = self._operators.sources.get(storage, frozenset())
        is_in_place = storage == self._storages[name]
        return _SumWith(name) in sources or (_INPUTS in sources and (is_in_place or name in sources))


class _Sources(OperatorMode):
    """Notes, while active, the storages that operators change, and on what values the results of operators depend.

    Args:
        tables: names of the buffers that are sources, by storage; without any, no sources are noted.
        inputs: of the forward.
    """

    def __init__(self, tables: Mapping[int, str], inputs: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()
        self.sources: dict[int, frozenset[str | _SumWith]] = {}
        self._tables = tables
        self._kept: list[torch.Tensor] = []
        for tensor in tensors_in(inputs):
            self._note(tensor, frozenset({_INPUTS}))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute an operator."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        changed = list(_changed_by(func, args, kwargs)) if isinstance(func, OpOverload) else []
        self.written.update(map(storage_of, changed))
        if self._tables:
            name = func._schema.name.partition("::")[2] if isinstance(func, OpOverload) else ""
            sources = self._sources_of(name, tensors_in((args, kwargs)))
            if sources:
                for tensor in (*changed, *tensors_in(result)):
                    self._note(tensor, sources)
        return result

    def _sources_of(self, operator: str, given: Sequence[torch.Tensor]) -> frozenset[str | _SumWith]:
        """Return the sources of the values that an operator computes from tensors."""
        if takes_only_shape(operator):
            return frozenset()
        found: frozenset[str | _SumWith] = frozenset()
        for tensor in given[1:] if operator in _OVERWRITING else given:
            storage = storage_of(tensor)
            found |= self.sources.get(storage, frozenset())
            if (table := self._tables.get(storage)) is not None:
                found |= {table, _SumWith(table)} if operator in _ADDING else {table}
        return found

    def _note(self, tensor: torch.Tensor, sources: frozenset[str | _SumWith]) -> None:
        storage = storage_of(tensor)
        self._kept.append(tensor)
        self.sources[storage] = self.sources.get(storage, frozenset()) | sources


def _changed_by(operator: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator changes.

    Kernels of batch normalisation change the running statistics, which they get in training, beside their results;
    most of their schemas do not say so.
    """
    if operator._schema.is_mutable:
        yield from written(operator, args, kwargs)
    if "batch_norm" in operator._schema.name:
        names = (parameter.name for parameter in operator._schema.arguments)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("training"):
            yield from (given[name] for name in _STATISTICS if isinstance(given.get(name), torch.Tensor))
