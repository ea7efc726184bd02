"""Recorder of the attributes of modules that a model's forward assigns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from legoai.specs.models.torch_internals import assignments_noted

_Place = tuple[nn.Module, str]
_ABSENT: Final = object()
_INHERITED: Final = frozenset(vars(nn.Module()))


@dataclass(slots=True)
class _Frame:
    """A call of a module that is being executed."""

    module: nn.Module
    containers: dict[str, tuple[Any, list[Any]]]
    """Its lists and dictionaries, each with what it held before the call."""
    before: dict[_Place, Any] = field(default_factory=dict)
    """Values before the call of what has been assigned since."""
    found: dict[_Place, None] = field(default_factory=dict)


class AssignedAttributes:
    """Records, while entered, which attributes of modules the call of each module assigns.

    A tensor or a module counts whenever it is assigned, `self.calls += 1` of a buffer included; another value where the
    attribute was not there, or has another one when the call ends; a list or dictionary of the module where it holds
    other items then. A tensor that is changed in place does not count.

    A call includes the hooks that its module had before the recorder was entered.
    """

    def __init__(self, model: nn.Module) -> None:
        self.by_module: dict[str, list[str]] = {}
        """Paths of the attributes that the call of a module assigns, by its path, those it calls included."""
        self._paths = {module: path for path, module in model.named_modules()}
        self._entered: list[_Frame] = []
        self._handles: list[RemovableHandle] = []
        self._assignments = assignments_noted(self._note)

    def __enter__(self) -> AssignedAttributes:
        for module in self._paths:
            self._handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
            self._handles.append(module.register_forward_hook(self._leave))
        self._assignments.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._assignments.__exit__(*exception)
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        held = {name: (value, _items(value)) for name, value in _containers(module)}
        self._entered.append(_Frame(module, held))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        frame = self._entered.pop()
        for name, (value, items) in frame.containers.items():
            if not _are_same(items, _items(value)):
                self._find((module, name), frame)
        frame.found |= {place: None for place, before in frame.before.items() if not _is_same(before, _held(*place))}
        if frame.found:
            paths = self.by_module.setdefault(self._paths[module], [])
            for holder, name in frame.found:
                path = f"{self._paths[holder]}.{name}".lstrip(".")
                if path not in paths:
                    paths.append(path)

    def _note(self, module: nn.Module, name: str, value: Any) -> None:
        if module not in self._paths:
            return
        before = _held(module, name)
        for frame in self._entered:
            if before is _ABSENT or isinstance(value, torch.Tensor | nn.Module):
                frame.found[module, name] = None
            frame.before.setdefault((module, name), before)

    def _find(self, place: _Place, innermost: _Frame) -> None:
        for frame in (*self._entered, innermost):
            frame.found[place] = None


def _held(module: nn.Module, name: str) -> Any:
    """Return what a module has under a name, without calling a method of its own."""
    for values in (vars(module), module._parameters, module._buffers, module._modules):
        if name in values:
            return values[name]
    return _ABSENT


def _containers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the lists and dictionaries that a module has beyond those of every module."""
    for name, value in vars(module).items():
        if isinstance(value, list | dict) and name not in _INHERITED:
            yield name, value


def _items(container: list[Any] | dict[Any, Any]) -> list[Any]:
    if isinstance(container, dict):
        return [item for pair in container.items() for item in pair]
    return list(container)


def _are_same(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(map(_is_same, before, after))


def _is_same(before: Any, after: Any) -> bool:
    """Whether two values are one, or equal numbers or texts."""
    return before is after or (
        isinstance(after, bool | int | float | str) and type(before) is type(after) and before == after
    )
