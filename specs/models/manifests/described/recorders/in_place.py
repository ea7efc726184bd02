"""Recorder of the tensors that a model's forward changes in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from legoai.specs.models.manifests.changes import ChangedResult, Changes
from legoai.specs.models.manifests.described.recorders.functions import (
    function_name,
    operation_of,
    takes_only_shape,
    tensors_in,
)
from legoai.specs.models.torch_internals import OperatorMode, OpOverload, storage_of, whole_of


@dataclass(slots=True)
class _Found:
    own_input: bool = False
    trained_input: bool = False
    received_input: bool = False
    results: dict[ChangedResult, None] = field(default_factory=dict)
    noise: bool = False


class _Given(NamedTuple):
    """A tensor that a forward was given; see `Changes`."""

    is_trained: bool
    is_received: bool


class InPlaceRecorder:
    """Records, while entered, which modules change their inputs, and whose results are changed.

    Tensors are kept alive until the recorder is deleted, so that their storages stay distinct: record on the meta
    device. A model's own parameters and buffers do not count as inputs.

    Tensors are told apart by their storages. A cast that changes no dtype returns its argument, which is changed with
    it; here it returns another tensor of the same storage, so that other recorders see a result.
    """

    def __init__(self, model: nn.Module) -> None:
        self._found: dict[str, _Found] = {}
        self._paths = {module: path for path, module in model.named_modules()}
        self._owned = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._trained = {storage_of(parameter) for parameter in model.parameters() if parameter.requires_grad}
        """Storages of the parameters that are trained, and of what is computed from them."""
        self._entered: list[tuple[str, dict[int, _Given]]] = []
        """Paths of the modules whose forward runs, outermost first, with what they were given."""
        self._returned: dict[int, dict[str, str]] = {}
        """The modules that returned a tensor of a storage, each with `ChangedResult.operator`."""
        self._views: set[tuple[int, str]] = set()
        """The storages of which a module returned a view, each with its path."""
        self._makers: dict[int, tuple[str, frozenset[str]]] = {}
        """The operator that made a storage in `_trained`, and the paths of the modules whose forward ran."""
        self._used: set[int] = set()
        """Storages in `_trained` from which another was computed."""
        self._kept: list[torch.Tensor] = []
        self._handles: list[RemovableHandle] = []
        self._operators = _Changing(self._change, self._fill, self._compute)
        self._casts = _Casting()

    @property
    def changes(self) -> Mapping[str, Changes]:
        """The changes of each module that has some, by path."""
        return {
            path: Changes(item.own_input, item.trained_input, item.received_input, tuple(item.results), item.noise)
            for path, item in self._found.items()
        }

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
        given = {}
        for tensor in self._own(tensors_in((args, kwargs))):
            storage = storage_of(tensor)
            is_trained = storage in self._trained
            given[storage] = _Given(is_trained, is_trained and storage in self._returned)
        self._entered.append((self._paths[module], given))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        path, _ = self._entered.pop()
        for tensor in self._own(tensors_in(result)):
            operator, within = self._makers.get(storage_of(tensor), ("", frozenset()))
            is_used = path in within and storage_of(tensor) in self._used
            self._returned.setdefault(storage_of(tensor), {})[path] = operator if is_used else ""
            if whole_of(tensor) is not None:
                self._views.add((storage_of(tensor), path))

    def _own(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the floating-point tensors that are no parameters or buffers."""
        for tensor in tensors:
            if tensor.is_floating_point() and storage_of(tensor) not in self._owned:
                self._kept.append(tensor)
                yield tensor

    def _change(self, tensor: torch.Tensor) -> None:
        """Note a change of a tensor by the innermost forward."""
        storage = storage_of(tensor)
        for path, given in self._entered:
            if storage in given:
                found = self._of(path)
                found.own_input = True
                found.trained_input |= given[storage].is_trained
                found.received_input |= given[storage].is_received
        for path, operator in self._returned.get(storage, {}).items():
            above = next((above for above, _ in reversed(self._entered) if _is_below(path, above)), None)
            if above is not None:
                by = self._entered[-1][0]
                is_view = (storage, path) in self._views
                changed = ChangedResult(_relative(path, above), _relative(by, above), operator, is_view)
                self._of(above).results[changed] = None

    def _fill(self) -> None:
        """Note that the innermost forward fills a tensor with random numbers that autograd has saved."""
        if self._entered:
            self._of(self._entered[-1][0]).noise = True

    def _compute(self, operator: Any, given: Iterable[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        """Note what an operator made of tensors, some of them perhaps computed from parameters."""
        trained = {storage_of(tensor) for tensor in given if tensor.is_floating_point()} & self._trained
        if not trained:
            return
        self._kept += made
        results = {storage_of(tensor) for tensor in made if tensor.is_floating_point()}
        if results - trained:  # others are views
            self._used |= trained
        for storage in results - self._trained:
            self._trained.add(storage)
            self._makers[storage] = str(operator), frozenset(path for path, _ in self._entered)

    def _of(self, path: str) -> _Found:
        return self._found.setdefault(path, _Found())


class Writing(OperatorMode):
    """Calls a function, while active, for each tensor that an operator changes."""

    def __init__(self, change: Callable[[torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._change = change

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute an operator."""
        kwargs = kwargs or {}
        if isinstance(func, OpOverload) and func._schema.is_mutable:
            for tensor in written(func, args, kwargs):
                self._change(tensor)
        return func(*args, **kwargs)


class _Changing(Writing):  # type: ignore[no-untyped-call]
    """Calls functions, while active: for each tensor that an operator changes, each noise fill, and what it makes."""

    def __init__(
        self,
        change: Callable[[torch.Tensor], None],
        fill: Callable[[], None],
        compute: Callable[[Any, Iterable[torch.Tensor], Sequence[torch.Tensor]], None],
    ) -> None:
        super().__init__(change)
        self._fill = fill
        self._compute = compute

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute an operator."""
        is_operator = isinstance(func, OpOverload)
        is_mutable = is_operator and func._schema.is_mutable
        if is_mutable and "noise" in _names(func) and torch.Tag.nondeterministic_seeded in func.tags:
            self._fill()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not (is_operator and takes_only_shape(func._schema.name.partition("::")[2])):
            self._compute(func, tensors_in((args, kwargs or {})), tensors_in(result))
        return result


class _Casting(TorchFunctionMode):
    """Replaces, while active, the result of each cast that returned its own argument by a view of it."""

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
        return result.detach() if is_cast else result


def written(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator changes."""
    given = {**dict(zip(_names(operator), args, strict=False)), **kwargs}
    for parameter in operator._schema.arguments:
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            yield from tensors_in(given.get(parameter.name))


def _names(operator: OpOverload) -> list[str]:
    return [parameter.name for parameter in operator._schema.arguments]


def _is_below(path: str, above: str) -> bool:
    return path != above and (not above or path.startswith(f"{above}."))


def _relative(path: str, above: str) -> str:
    return "" if path == above else path.removeprefix(f"{above}." if above else "")
