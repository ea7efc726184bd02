"""What a factory leaves on a model on the meta device that is lost when a run allocates its parameters there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class LeftOnMeta(NamedTuple):
    """Hooks of parameters, and tensors that are neither parameters nor buffers.

    A run gives the model new parameters in place of those on the meta device, and moves its buffers.
    """

    hooked: tuple[str, ...] = ()
    """Paths of the parameters with hooks that are called with their gradients."""
    tensors: tuple[tuple[str, str], ...] = ()
    """Modules, by path, with those of their attributes that hold tensors whose values forward reads."""


def left_from(raw: Mapping[str, Sequence[Any]]) -> LeftOnMeta:
    """Read the serialised form."""
    tensors = ((module, attribute) for module, attribute in raw.get("tensors", ()))
    return LeftOnMeta(tuple(raw.get("hooked", ())), tuple(tensors))
