"""The module in whose forward a model fails, and whether torch's compiler fails at it too."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from legoai.specs.models.manifests.values_read import reads_a_value
from legoai.specs.models.torch_internals import why_not_one_graph


class FailingModule:
    """Notes, while entered, the innermost module whose forward runs, with its arguments, until a forward fails."""

    def __init__(self, model: nn.Module, outside: Collection[str]) -> None:
        """Watch a model.

        Args:
            model: whose forward may fail.
            outside: paths of the modules around its repeated blocks.
        """
        self._paths = {module: path for path, module in model.named_modules()}
        self._outside = outside
        self._entered: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> FailingModule:
        self._entered.clear()
        for module in self._paths:
            self._handles.append(module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave))
        return self

    def __exit__(self, *exception: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._entered.append((module, args, kwargs))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        self._entered.pop()

    def graph_break(self, error: Exception) -> tuple[str, str] | None:
        """Return the path of the module at which an error was raised, and why it is not compiled as one graph.

        A value may be read by an `assert`, which the compiler traces, or in code that it skips: the module is traced.
        One around repeated blocks is not, because that would take long; its reads are assumed to break the graph.

        Args:
            error: raised by the forward, while this was entered.

        Returns:
            None if forward did not read a value, or if the compiler traces the module.
        """
        if not self._entered or not reads_a_value(str(error)):
            return None
        module, args, kwargs = self._entered[-1]
        path = self._paths[module]
        why = "Data-dependent operation" if path in self._outside else why_not_one_graph(module, args, kwargs)
        return None if why is None else (path, why)
