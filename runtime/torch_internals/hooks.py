"""Hooks of modules, taken off to be called by others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Hooks = tuple[tuple[Callable[..., Any], bool], ...]
"""Hooks in their order, each with whether it takes the keyword arguments of the call."""

__all__ = ["Hooks", "take_forward_hooks"]


def take_forward_hooks(module: nn.Module) -> tuple[Hooks, Hooks]:
    """Remove the hooks of a module's call, and return those before its forward and those after it."""
    before = tuple(
        (hook, key in module._forward_pre_hooks_with_kwargs) for key, hook in module._forward_pre_hooks.items()
    )
    after = tuple((hook, key in module._forward_hooks_with_kwargs) for key, hook in module._forward_hooks.items())
    for held in (
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    ):
        held.clear()
    return before, after
