"""Recorder of the parameters that a model's forward changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from legoai.specs.models.manifests.described.recorders.in_place import Writing
from legoai.specs.models.torch_internals import storage_of

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class ChangedParameters:
    """Records, while entered, which parameters each module's own forward changes in place, or gives other values.

    Storages are compared, so that a change of `parameter.data` counts: record on the meta device.
    """

    def __init__(self, model: nn.Module) -> None:
        self.by_module: dict[str, list[str]] = {}
        """Paths of the parameters that the forward of a module changes, by its path, without those it calls."""
        self._paths = {module: path for path, module in model.named_modules()}
        self._parameters = {storage_of(parameter): path for path, parameter in model.named_parameters()}
        self._kept: list[torch.Tensor] = []
        """Values of parameters, so that their storages stay distinct."""
        self._entered: list[str] = []
        self._handles: list[RemovableHandle] = []
        self._modes = Writing(self._change), _Replacing(self._replace)

    def __enter__(self) -> ChangedParameters:
        for module in self._paths:
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave))
        for mode in self._modes:
            mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*exception)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._entered.append(self._paths[module])

    def _leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        self._entered.pop()

    def _change(self, tensor: torch.Tensor) -> None:
        path = self._parameters.get(storage_of(tensor))
        if path is None or not self._entered:
            return
        changed = self.by_module.setdefault(self._entered[-1], [])
        if path not in changed:
            changed.append(path)

    def _replace(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        path = self._parameters.get(storage_of(tensor))
        if path is not None and storage_of(values) != storage_of(tensor):
            self._change(tensor)
            self._kept += [tensor.detach(), values]
            self._parameters[storage_of(values)] = path


class _Replacing(TorchFunctionMode):
    """Calls a function, while active, before a tensor gets the values of another: `tensor.data = values`."""

    def __init__(self, replace: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()
        self._replace = replace

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute a torch function."""
        if func == _SET_DATA:
            self._replace(*args)
        return func(*args, **(kwargs or {}))
