"""The module in whose forward a model fails, and whether torch's compiler fails at it too."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any, Final

from torch import nn
from torch.utils.hooks import RemovableHandle

from legoai.specs.models.manifests.values_read import reads_a_value
from legoai.specs.models.torch_internals import why_not_one_graph

_LONGEST: Final = 10.0
"""Seconds of computation for which a module is traced: loops over values, as over experts, take long."""


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
        self._failed: tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | None = None

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

    def note(self, error: Exception) -> None:
        """Note an error of the forward, raised while this was entered; the last that read a value counts."""
        if self._entered and reads_a_value(str(error)):
            self._failed = self._entered[-1]

    def graph_break(self) -> tuple[str, str] | None:
        """Return the path of the module at which a forward failed, and why that is not compiled as one graph.

        A value may be read by an `assert`, which the compiler traces, or in code that it skips: the module is traced.
        One around repeated blocks is not, because that would take long; its reads are assumed to break the graph.

        Returns:
            None if no forward failed by reading a value, if the compiler traces the module, or if that takes too long.
        """
        if self._failed is None:
            return None
        module, args, kwargs = self._failed
        path = self._paths[module]
        if path in self._outside:
            return path, "Data-dependent operation"
        with _limited():
            why = why_not_one_graph(module, args, kwargs)
        return None if why is None else (path, why)


@contextmanager
def _limited() -> Iterator[None]:
    """Raise `TimeoutError` in what computes for too long, on the main thread."""
    if current_thread() is not main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, _LONGEST, 1.0)  # again, if the first is caught on its way
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
