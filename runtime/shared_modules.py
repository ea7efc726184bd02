"""Replacement of a module that several modules hold."""

from __future__ import annotations

from torch import nn


def replace_everywhere(model: nn.Module, module: nn.Module, by: nn.Module) -> None:
    """Put another module in all places of one.

    Args:
        model: that holds it.
        module: to replace; other modules within the model may hold it too.
        by: what takes its place. It may contain the module itself.
    """
    for holder in list(model.modules()):
        for name, child in holder._modules.items():
            if child is module:
                holder._modules[name] = by
