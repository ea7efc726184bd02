"""Errors of forwards that read the values of tensors on the meta device."""

from __future__ import annotations

from typing import Final

_RAISED: Final = ("Tensor.item() cannot", "copy out of meta tensor", "convert meta device")
"""What torch raises where the value of a tensor on the meta device is read."""


def reads_a_value(error: str) -> bool:
    """Whether the text of an error, or of several, is raised where a value is read."""
    return any(text in error for text in _RAISED)
