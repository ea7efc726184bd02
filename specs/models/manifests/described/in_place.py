"""Recorder of the tensors that a model's forward changes in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from legoai.specs.models.manifests.changes import ChangedResult, Changes
from legoai.specs.models.manifests.described.functions import function_name, operation_of, tensors_in
from legoai.specs.models.torch_internals import OperatorMode, OpOverload, storage_key, whole_of


@dataclass(slots=True)
class _Found:
    own_input: bool = False
    results: dict[ChangedResult, None] = field(default_factory=dict)
    noise: bool = False


class InPlaceRecorder:
    """Records, while entered, which modules change their inputs, and whose results are changed.

    Tensors are kept alive until the recorder is deleted, so that their storages stay distinct: record on the meta
    device. A model's own parameters and buffers do not count as inputs.

    A cast makes a new tensor here even where it changes no dtype. Models are followed in fp32, in which `x.float()` is
    `x` itself, and mostly train with parameters in bf16, in which it is a copy. Where they train in fp32, a change of
    it is noted by PyTorch alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._found: dict[str, _Found] = {}
        self._paths = {module: path for path, module in model.named_modules()}
        self._owned = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._entered: list[tuple[str, set[int]]] = []
        """Paths of the modules whose forward runs, outermost first, with the storages that they were given."""
        self._returned: dict[int, dict[str, None]] = {}
        """The modules that returned a tensor of a storage."""
        self._cast: set[int] = set()
        """Identities of the tensors that a cast returned in place of its argument."""
        self._kept: list[torch.Tensor] = []
        self._handles: list[RemovableHandle] = []
        self._operators = _Changing(self._change, self._fill)
        self._casts = _Casting(self._separate)

    @property
    def changes(self) -> Mapping[str, Changes]:
        """The changes of each module that has some, by path."""
        return {path: Changes(item.own_input, tuple(item.results), item.noise) for path, item in self._found.items()}

    def __enter__(self) -> InPlaceRecorder:
        for module in self._paths:
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave))
        self._operators.__enter__()  # type: ignore[no-untyped-call]
        self._casts.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        self._casts.__exit__(*exception)  # type: ignore[no-untyped-call]
        self._operators.__exit__(*exception)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._entered.append((self._paths[module], set(self._storages((args, kwargs)))))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        path, _ = self._entered.pop()
        for storage in self._storages(result):
            self._returned.setdefault(storage, {})[path] = None

    def _storages(self, values: Any) -> Iterator[int]:
        for tensor in tensors_in(values):
            if tensor.is_floating_point() and _storage(tensor) not in self._owned:
                self._kept.append(tensor)
                yield self._key(tensor)

    def _key(self, tensor: torch.Tensor) -> int:
        """What a tensor has in common with its views: its storage, or the cast that would have made one."""
        whole = whole_of(tensor)
        origin = id(tensor if whole is None else whole)
        return origin if origin in self._cast else _storage(tensor)

    def _separate(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what a cast of a tensor to its own dtype would return if it copied."""
        # It shares the storage, by which other recorders know the features of layers.
        result = tensor.detach()
        self._kept.append(result)
        self._cast.add(id(result))
        return result

    def _change(self, tensor: torch.Tensor) -> None:
        """Note a change of a tensor by the innermost forward."""
        storage = self._key(tensor)
        for path, given in self._entered:
            if storage in given:
                self._of(path).own_input = True
        for path in self._returned.get(storage, ()):
            above = next((above for above, _ in reversed(self._entered) if _is_below(path, above)), None)
            if above is not None:
                by = self._entered[-1][0]
                self._of(above).results[ChangedResult(_relative(path, above), _relative(by, above))] = None

    def _fill(self) -> None:
        """Note that the innermost forward fills a tensor with random numbers that autograd has saved."""
        if self._entered:
            self._of(self._entered[-1][0]).noise = True

    def _of(self, path: str) -> _Found:
        return self._found.setdefault(path, _Found())


class _Changing(OperatorMode):
    """Calls a function, while active, for each tensor that an operator changes, and another for each noise it fills."""

    def __init__(self, change: Callable[[torch.Tensor], None], fill: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._change = change
        self._fill = fill

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute an operator."""
        kwargs = kwargs or {}
        if isinstance(func, OpOverload) and func._schema.is_mutable:
            for tensor in _written(func, args, kwargs):
                self._change(tensor)
            if "noise" in _names(func) and torch.Tag.nondeterministic_seeded in func.tags:
                self._fill()
        return func(*args, **kwargs)


class _Casting(TorchFunctionMode):
    """Replaces, while active, the result of each cast that returned its own argument, a floating-point tensor."""

    def __init__(self, separate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._separate = separate

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute a torch function."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        is_same = isinstance(result, torch.Tensor) and args and result is args[0]
        if not is_same or not result.is_floating_point() or operation_of(name := function_name(func)) != "cast":
            return result
        # `x.to(device)` is no cast.
        told = (*args[1:], *kwargs.values())
        is_cast = name != "to" or any(isinstance(item, torch.dtype | torch.Tensor) for item in told)
        return self._separate(result) if is_cast else result


def _written(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator changes."""
    given = {**dict(zip(_names(operator), args, strict=False)), **kwargs}
    for parameter in operator._schema.arguments:
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            yield from tensors_in(given.get(parameter.name))


def _names(operator: OpOverload) -> list[str]:
    return [parameter.name for parameter in operator._schema.arguments]


def _storage(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def _is_below(path: str, above: str) -> bool:
    return path != above and (not above or path.startswith(f"{above}."))


def _relative(path: str, above: str) -> str:
    return "" if path == above else path.removeprefix(f"{above}." if above else "")
