"""Tensors that a model holds without being told of them, and those of them that its forward reads."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from legoai.specs.models.manifests.described.forwards.restored import attributes_restored
from legoai.specs.models.manifests.described.recorders.functions import function_name, takes_only_shape, tensors_in
from legoai.specs.models.torch_internals import DEVICE_OF, IS_META, OperatorMode, storage_of

_HOST: Final = torch.device("cpu")
_WITHOUT_TENSORS: Final = (type, ModuleType, str, bytes, int, float, complex, type(None))


class PlainTensors:
    """The tensors on the meta device that attributes of modules lead to, other than parameters and buffers.

    Attributes of the modules and of their classes lead to them through lists, dictionaries, objects, modules that are
    not registered, and the variables of functions. A run leaves them there: they have no values. One that shares its
    memory with a parameter or a buffer is not noted.
    """

    def __init__(self, model: nn.Module) -> None:
        self.read: dict[tuple[str, str, str], None] = {}
        """Module and attribute of those that were read, in order, and the class of the module that is not registered
        which holds them, or an empty string."""
        self._model = model
        registered = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._held: dict[int, tuple[str, str, str]] = {}
        seen = {id(module) for module in model.modules()}
        for path, module in model.named_modules():
            for name, value in _attributes(module):
                for tensor, holder in _reached(value, seen):
                    if tensor.is_meta and storage_of(tensor) not in registered:
                        self._held.setdefault(storage_of(tensor), (path, name, holder))

    def read_by(self, inputs: tuple[Any, ...]) -> None:
        """Run the forward, and note which of them it reads; the modules' attributes are afterwards as before.

        Forward is told that they are on another device than its inputs, as in a run: one that computes such a tensor
        anew where its device differs does not read it.
        """
        if not self._held:
            return
        with (
            attributes_restored(self._model),
            contextlib.suppress(Exception),  # a forward that fails is reported by itself
            torch.no_grad(),
            _Devices(self._held),
            _Reading(self._note),
        ):
            self._model(*inputs)

    def _note(self, tensor: torch.Tensor) -> None:
        if (found := self._held.get(storage_of(tensor))) is not None:
            self.read[found] = None


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module and of its classes, other than those of every module."""
    own = vars(nn.Module())
    yield from ((name, value) for name, value in vars(module).items() if name not in own)
    for item in type(module).__mro__:
        if not _is_known(item):
            yield from vars(item).items()


def _reached(value: Any, seen: set[int]) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield the tensors to which a value leads, each with the class of the innermost module that holds it.

    Args:
        value: of an attribute.
        seen: what it does not lead through, by `id`; extended.
    """
    waiting: list[tuple[Any, str]] = [(value, "")]
    while waiting:
        item, holder = waiting.pop()
        if isinstance(item, torch.Tensor):
            yield item, holder
        elif not isinstance(item, _WITHOUT_TENSORS) and id(item) not in seen:
            seen.add(id(item))
            is_module = isinstance(item, nn.Module)
            waiting.extend((part, type(item).__name__ if is_module else holder) for part in _parts(item))


def _parts(value: Any) -> list[Any]:
    """Return what a value holds."""
    if isinstance(value, dict):
        return list(dict.values(value))  # those of some subclasses are imported when one asks for them
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    if isinstance(value, staticmethod | classmethod | MethodType):
        return [value.__func__, getattr(value, "__self__", None)]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, FunctionType):
        cells = (cell.cell_contents for cell in value.__closure__ or () if cell != CellType())  # an empty one
        return [*cells, value.__defaults__, value.__kwdefaults__]
    if _is_known(type(value)) and not isinstance(value, nn.Module | SimpleNamespace):
        return []
    slots = (name for item in type(value).__mro__ for name in getattr(item, "__slots__", ()))
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


def _is_known(kind: type) -> bool:
    """Whether a class is Python's or torch's own."""
    return kind.__module__.partition(".")[0] in ("torch", *sys.stdlib_module_names)


class _Devices(TorchFunctionMode):
    """Tells, while active, another device of some tensors on the meta device."""

    def __init__(self, held: Mapping[int, Any]) -> None:
        super().__init__()
        self._held = held

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute a torch function."""
        if func in (DEVICE_OF, IS_META) and storage_of(args[0]) in self._held:
            return _HOST if func == DEVICE_OF else False
        return func(*args, **(kwargs or {}))


class _Reading(OperatorMode):
    """Calls a function, while active, for each tensor from whose values an operator computes something."""

    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute an operator."""
        name = function_name(getattr(func, "overloadpacket", func))
        given = [] if takes_only_shape(name) else tensors_in((args, kwargs or {}))
        made: set[int] | None = None
        try:
            result = func(*args, **(kwargs or {}))
            made = {storage_of(tensor) for tensor in tensors_in(result)}
        finally:
            for tensor in given:
                if not made or made != {storage_of(tensor)}:  # not a view of it alone
                    self._note(tensor)
        return result
