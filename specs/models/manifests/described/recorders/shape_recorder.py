"""Recorder of the shapes that modules take and give in one forward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from legoai.specs.models.manifests import shapes
from legoai.specs.models.manifests.shapes import Shape

Concrete = tuple[int, ...] | None
"""Shape of one tensor; None for anything else."""


class ShapeRecorder:
    """Records, while entered, the first call of some modules: the shape of the first argument and that of the result.

    Args:
        modules: paths to modules.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.calls: dict[str, tuple[Concrete, Concrete]] = {}
        self._modules = modules
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> ShapeRecorder:
        for path, module in self._modules.items():

            def note(_: nn.Module, args: Any, kwargs: Any, result: Any, path: str = path) -> None:
                first = next(iter((*args, *kwargs.values())), None)
                self.calls.setdefault(path, (_shape(first), _shape(result)))

            self._handles.append(module.register_forward_hook(note, with_kwargs=True))
        return self

    def __exit__(self, *exception: Any) -> None:
        for handle in self._handles:
            handle.remove()


def followed_shapes(
    first: ShapeRecorder, second: ShapeRecorder | None, sizes: shapes.Sizes
) -> dict[str, tuple[Shape | None, Shape | None]]:
    """Return what each module takes and gives, in samples and tokens.

    Args:
        first: of a forward of token ids of the shape `sizes`.
        second: of one of `other_sizes(sizes)`; None where the model cannot run at these.
        sizes: samples and tokens.
    """

    def told(one: Concrete, other: Concrete) -> Shape | None:
        if one is None or (second is not None and other is None):
            return None
        if second is None:
            return shapes.guessed(one, sizes)
        assert other is not None
        return shapes.compared(one, other, sizes, shapes.other_sizes(sizes))

    found: dict[str, tuple[Shape | None, Shape | None]] = {}
    for path, (takes, gives) in first.calls.items():
        again = (None, None) if second is None else second.calls.get(path, (None, None))
        found[path] = told(takes, again[0]), told(gives, again[1])
    return found


def outside_of_blocks(model: nn.Module, blocks: Iterable[str]) -> dict[str, nn.Module]:
    """Return the modules of a model by path, without those inside of its blocks."""
    held = set(blocks)
    found: dict[str, nn.Module] = {}
    below: str | None = None
    for path, module in model.named_modules():
        if below is not None and path.startswith(f"{below}."):
            continue
        below = path if path in held else None
        found[path] = module
    return found


def _shape(value: Any) -> Concrete:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
