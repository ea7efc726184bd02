"""Torch functions of a forward, with the modules in whose forward each is called."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle


class FunctionRecorder(TorchFunctionMode):
    """Knows, while entered, the modules whose forward runs; subclasses note the functions.

    Args:
        model: whose modules are told by their paths.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._paths = {module: path for path, module in model.named_modules()}
        self._within: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Any:
        for module in self._paths:
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._within.append(module)

    def _leave(self, *_: Any) -> None:
        self._within.pop()
