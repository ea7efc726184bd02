"""State that a factory leaves on a model on the meta device, and that is lost when a run allocates its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class LeftOnMeta(NamedTuple):
    """Hooks of parameters, and tensors that are neither parameters nor buffers.

    A run gives the model new parameters in place of those on the meta device, and moves its buffers.
    """

    hooked: tuple[str, ...] = ()
    """Paths of the parameters with hooks that are called with their gradients."""
    tensors: tuple[tuple[str, str, str], ...] = ()
    """Modules, by path, with those of their attributes that lead to tensors whose values forward reads, and the class
    of the module that is not registered which holds them, or an empty string."""


def left_from(raw: Mapping[str, Sequence[Any]]) -> LeftOnMeta:
    """Read the serialised form."""
    tensors = ((module, attribute, holder) for module, attribute, holder in raw.get("tensors", ()))
    return LeftOnMeta(tuple(raw.get("hooked", ())), tuple(tensors))
