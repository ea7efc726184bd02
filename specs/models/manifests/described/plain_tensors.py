"""Tensors that a model holds as plain attributes of its modules, and those of them that its forward reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from legoai.specs.models.manifests.described.functions import function_name, takes_only_shape, tensors_in
from legoai.specs.models.manifests.described.restored import attributes_restored
from legoai.specs.models.torch_internals import DEVICE_OF, IS_META, OperatorMode, storage_of

_HOST: Final = torch.device("cpu")


class PlainTensors:
    """The tensors on the meta device that modules hold as plain attributes, also in lists and dictionaries.

    A run leaves them there: they have no values. One that shares its memory with a parameter or a buffer is not noted.
    """

    def __init__(self, model: nn.Module) -> None:
        self.read: dict[tuple[str, str], None] = {}
        """Module and attribute of those that were read, in order."""
        self._model = model
        registered = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._held: dict[int, tuple[str, str]] = {}
        for path, module in model.named_modules():
            for name, tensor in _attributes(module):
                if tensor.is_meta and storage_of(tensor) not in registered:
                    self._held.setdefault(storage_of(tensor), (path, name))

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


def _attributes(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a module's attributes, other than its parameters and buffers, by the attribute's name."""
    own = vars(nn.Module())
    for name, value in vars(module).items():
        if name not in own:
            for tensor in tensors_in(value):
                yield name, tensor


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
