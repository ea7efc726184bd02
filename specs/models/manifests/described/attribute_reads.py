"""Attributes of modules that a forward around them reads, as `self.embedding.weight.dtype` does."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import torch
from torch import nn

from legoai.specs.models.torch_internals import attributes_hidden

_OF_EVERY_MODULE: Final = frozenset(dir(nn.Module()))
_MOST: Final = 8
"""Reads of one model that are looked for."""


class AttributeReads:
    """Reads of attributes of modules by forwards around them, without which these fail.

    A stage of a pipeline has placeholders for the modules of other stages, without attributes of theirs.

    Args:
        model: whose forward runs.
        readers: paths of the modules whose forwards run on every stage.
    """

    def __init__(self, model: nn.Module, readers: Collection[str]) -> None:
        self.found: list[tuple[str, str, str]] = []
        """The path of the module that reads, that of the other module, and the attribute; one for equal modules."""
        self._model = model
        self._paths = {module: path for path, module in model.named_modules()}
        self._readers = frozenset(readers)
        self._entered: list[nn.Module] = []
        self._allowed: set[tuple[str, type, str]] = set()
        self._last: tuple[nn.Module, nn.Module, str] | None = None

    def read_by(self, inputs: tuple[Any, ...]) -> None:
        """Run a forward that is known to succeed without the attributes, again with each of them that it needs."""
        for _ in range(_MOST):
            self._last = None
            try:
                with torch.no_grad(), self._noting(), attributes_hidden(self._hides):
                    self._model(*inputs)
                return
            except Exception:
                if self._last is None:
                    return
                reader, module, name = self._last
                self.found.append((self._paths[reader], self._paths[module], name))
                self._allowed.add((self._paths[reader], type(module), name))

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note which forwards run."""
        self._entered = []
        handles = []
        for module in self._paths:
            # Before hooks of the model's author, which may read attributes of their module.
            handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
            handles.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._entered.append(module)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        self._entered.pop()

    def _hides(self, module: nn.Module, name: str, frame: FrameType | None) -> bool:
        """Whether the frame is in a forward around the module, on a stage that may have a placeholder for that."""
        if name in _OF_EVERY_MODULE:
            return False
        reader = self._entered[-1] if self._entered else None
        path, above = self._paths.get(module), "" if reader is None else self._paths[reader]
        if reader is None or path is None or above not in self._readers or path in self._readers:
            return False
        if (above, type(module), name) in self._allowed or not (not above or path.startswith(f"{above}.")):
            return False
        if _is_by_itself(frame, module, reader):
            return False
        self._last = reader, module, name
        return True


def _is_by_itself(frame: FrameType | None, module: nn.Module, reader: nn.Module) -> bool:
    """Whether a method of a module runs, called by the reader's forward."""
    while frame is not None:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        first = frame.f_locals.get(names[0]) if names else None
        if first is module:
            return True
        if first is reader:
            return False
        frame = frame.f_back
    return False
