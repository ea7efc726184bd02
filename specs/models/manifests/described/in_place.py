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
from legoai.specs.models.manifests.described.functions import function_name, operation_of, tensors_in
from legoai.specs.models.torch_internals import OperatorMode, OpOverload, storage_key, whole_of


@dataclass(slots=True)
class _Found:
    own_input: bool = False
    trained_input: bool = False
    received_input: bool = False
    cast_input: bool = False
    results: dict[ChangedResult, None] = field(default_factory=dict)
    noise: bool = False


class _Given(NamedTuple):
    """A tensor that a forward was given; see `Changes`."""

    is_trained: bool
    is_received: bool
    storage: int


class InPlaceRecorder:
    """Records, while entered, which modules change their inputs, and whose results are changed.

    Tensors are kept alive until the recorder is deleted, so that their storages stay distinct: record on the meta
    device. A model's own parameters and buffers do not count as inputs.

    A cast makes a new tensor here even where it changes no dtype. Models are followed in fp32, in which `x.float()` is
    `x` itself, and mostly train with parameters in bf16, in which it is a copy. Changes of it are told apart.
    """

    def __init__(self, model: nn.Module) -> None:
        self._found: dict[str, _Found] = {}
        self._paths = {module: path for path, module in model.named_modules()}
        self._owned = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._trained = {_storage(parameter) for parameter in model.parameters() if parameter.requires_grad}
        """Storages of the parameters that are trained, and of what is computed from them."""
        self._entered: list[tuple[str, dict[int, _Given]]] = []
        """Paths of the modules whose forward runs, outermost first, with what they were given."""
        self._returned: dict[int, dict[str, str]] = {}
        """The modules that returned a tensor of a storage, each with `ChangedResult.operator`."""
        self._returned_storages: dict[int, dict[str, None]] = {}
        """The same as if casts returned their arguments."""
        self._views: set[tuple[int, str]] = set()
        """The storages of which a module returned a view, each with its path."""
        self._makers: dict[int, tuple[str, frozenset[str]]] = {}
        """The operator that made a storage in `_trained`, and the paths of the modules whose forward ran."""
        self._used: set[int] = set()
        """Storages in `_trained` from which another was computed."""
        self._cast: set[int] = set()
        """Identities of the tensors that a cast returned in place of its argument."""
        self._kept: list[torch.Tensor] = []
        self._handles: list[RemovableHandle] = []
        self._operators = _Changing(self._change, self._fill, self._compute)
        self._casts = _Casting(self._separate)

    @property
    def changes(self) -> Mapping[str, Changes]:
        """The changes of each module that has some, by path."""
        return {
            path: Changes(
                item.own_input,
                item.trained_input,
                item.received_input,
                item.cast_input,
                tuple(item.results),
                item.noise,
            )
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
            key, is_trained = self._key(tensor), _storage(tensor) in self._trained
            given[key] = _Given(is_trained, is_trained and key in self._returned, _storage(tensor))
        self._entered.append((self._paths[module], given))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        path, _ = self._entered.pop()
        for tensor in self._own(tensors_in(result)):
            operator, within = self._makers.get(_storage(tensor), ("", frozenset()))
            is_used = path in within and _storage(tensor) in self._used
            self._returned.setdefault(self._key(tensor), {})[path] = operator if is_used else ""
            self._returned_storages.setdefault(_storage(tensor), {})[path] = None
            if whole_of(tensor) is not None:
                self._views.add((_storage(tensor), path))

    def _own(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the floating-point tensors that are no parameters or buffers."""
        for tensor in tensors:
            if tensor.is_floating_point() and _storage(tensor) not in self._owned:
                self._kept.append(tensor)
                yield tensor

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
        key, storage = self._key(tensor), _storage(tensor)
        for path, given in self._entered:
            if key in given:
                found = self._of(path)
                found.own_input = True
                found.trained_input |= given[key].is_trained
                found.received_input |= given[key].is_received
            elif any(item.storage == storage for item in given.values()):
                self._of(path).cast_input = True
        returned = self._returned.get(key, {})
        for path in self._returned_storages.get(storage, ()):
            above = next((above for above, _ in reversed(self._entered) if _is_below(path, above)), None)
            if above is not None:
                by = self._entered[-1][0]
                names = _relative(path, above), _relative(by, above)
                is_view = (storage, path) in self._views
                changed = ChangedResult(*names, returned.get(path, ""), path not in returned, is_view)
                self._of(above).results[changed] = None

    def _fill(self) -> None:
        """Note that the innermost forward fills a tensor with random numbers that autograd has saved."""
        if self._entered:
            self._of(self._entered[-1][0]).noise = True

    def _compute(self, operator: Any, given: Iterable[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        """Note what an operator made of tensors, some of them perhaps computed from parameters."""
        trained = {_storage(tensor) for tensor in given if tensor.is_floating_point()} & self._trained
        if not trained:
            return
        self._kept += made
        results = {_storage(tensor) for tensor in made if tensor.is_floating_point()}
        if results - trained:  # others are views
            self._used |= trained
        for storage in results - self._trained:
            self._trained.add(storage)
            self._makers[storage] = str(operator), frozenset(path for path, _ in self._entered)

    def _of(self, path: str) -> _Found:
        return self._found.setdefault(path, _Found())


class _Changing(OperatorMode):
    """Calls functions, while active: for each tensor that an operator changes, each noise fill, and what it makes."""

    def __init__(
        self,
        change: Callable[[torch.Tensor], None],
        fill: Callable[[], None],
        compute: Callable[[Any, Iterable[torch.Tensor], Sequence[torch.Tensor]], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._change = change
        self._fill = fill
        self._compute = compute

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute an operator."""
        kwargs = kwargs or {}
        if isinstance(func, OpOverload) and func._schema.is_mutable:
            for tensor in written(func, args, kwargs):
                self._change(tensor)
            if "noise" in _names(func) and torch.Tag.nondeterministic_seeded in func.tags:
                self._fill()
        result = func(*args, **kwargs)
        if not _takes_only_shape(func):
            self._compute(func, tensors_in((args, kwargs)), tensors_in(result))
        return result


def _takes_only_shape(operator: Any) -> bool:
    """Whether an operator such as `zeros_like` or `new_full` has nothing but shape and dtype from its argument."""
    name: str = operator._schema.name.partition("::")[2] if isinstance(operator, OpOverload) else ""
    return name.endswith("_like") or name.startswith("new_")


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


def written(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
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
