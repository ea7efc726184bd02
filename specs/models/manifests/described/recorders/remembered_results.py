"""Results of operators on the meta device, remembered by what decides them: shapes, strides and dtypes of arguments.

Most meta operators of PyTorch are written in Python and take a tenth of a millisecond and more. The blocks of a model
call them with equal arguments again and again, and a model is followed several times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from legoai.specs.models.manifests.described.recorders.functions import tensors_in
from legoai.specs.models.torch_internals import DisableTorchFunction, OperatorMode, OpOverload, storage_of

_META: Final = torch.device("meta")

_UNDECIDED_TAGS: Final = frozenset(
    {
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
        torch.Tag.nondeterministic_seeded,
    }
)
"""Tags of operators whose results depend on more than the arguments' types, or that change a generator's state."""

_Type: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.dtype]


class _Results(NamedTuple):
    """Types of what an operator gave: of one tensor, or of those in a tuple or list, which may hold None instead."""

    container: type[tuple[Any, ...]] | type[list[Any]] | None
    types: Sequence[_Type | None]


class RememberedResults(OperatorMode):
    """While entered, an operator with arguments as before gives new tensors like those that it gave then.

    Entered before other modes, which thereby observe every operator. Executed each time are operators that write to
    their arguments, return views of them, or take or give tensors on other devices.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results: dict[tuple[Any, ...], _Results | None] = {}
        """None for calls that have to be executed each time."""
        self._decided: dict[Any, bool] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute an operator, or repeat its result."""
        named = kwargs or {}
        key = self._key(func, args, named)
        if key is None:
            return func(*args, **named)
        if key not in self._results:
            result = func(*args, **named)
            self._results[key] = _types_of(result, tensors_in((args, named)))
            return result
        results = self._results[key]
        if results is None:
            return func(*args, **named)
        with DisableTorchFunction():  # otherwise a mode would observe it as an operation of the model
            made = [None if type is None else _empty(*type) for type in results.types]
        return made[0] if results.container is None else results.container(made)

    def _key(self, func: Any, args: Sequence[Any], named: dict[str, Any]) -> tuple[Any, ...] | None:
        """Return what decides the result of a call; None where that is not known."""
        decided = self._decided.get(func)
        if decided is None:
            decided = self._decided[func] = _is_decided_by_types(func)
        if not decided:
            return None
        key: list[Any] = [func, torch.get_default_dtype()]
        if not _extend(key, args) or not all(_extend(key, item) for item in named.items()):
            return None
        try:
            hash(found := tuple(key))
        except TypeError:
            return None
        return found


def _is_decided_by_types(func: Any) -> bool:
    """Whether an operator makes new tensors whose types depend on those of its arguments alone."""
    if not isinstance(func, OpOverload) or _UNDECIDED_TAGS.intersection(func.tags):
        return False
    schema = func._schema
    return bool(schema.returns) and all(item.alias_info is None for item in (*schema.arguments, *schema.returns))


def _extend(key: list[Any], values: Iterable[Any]) -> bool:
    """Extend a key by arguments; return whether they can be part of one."""
    for value in values:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if value.device != _META or value.layout is not torch.strided:
                return False
            key.append((value.shape, value.stride(), value.dtype))
        elif kind is list or kind is tuple:
            key.append((kind, len(value)))
            if not _extend(key, value):
                return False
        elif isinstance(value, torch.Tensor):
            return False
        else:
            key.append((kind, value))  # 1, 1.0 and True are equal, and promote differently
    return True


def _types_of(result: Any, given: Sequence[torch.Tensor]) -> _Results | None:
    """Return the types of new tensors; None where some are not new, or where there is more to know of them."""
    storages = set(map(storage_of, given))
    container = next((kind for kind in (tuple, list) if type(result) is kind), None)
    items = (result,) if container is None else result
    types: list[_Type | None] = []
    for item in items:
        if item is None and container is not None:
            types.append(None)
            continue
        plain = type(item) is torch.Tensor and item.device == _META and item.layout is torch.strided
        if not plain or item.storage_offset() or (key := storage_of(item)) in storages:
            return None
        storages.add(key)
        types.append((item.shape, item.stride(), item.dtype))
    return _Results(container, types)


def _empty(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=_META)
