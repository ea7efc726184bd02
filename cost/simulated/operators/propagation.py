"""Cache of the metadata that DTensor propagates through operators, for all simulations of a process.

DTensor runs an operator on fake tensors of global shape to learn the shapes, strides and dtypes of its results. These
depend on neither mesh nor placements, unlike the rest of the propagation, which is forgotten with the meshes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Final

import torch

from legoai.cost.simulated.operators.results import PLAIN
from legoai.runtime.torch_internals.distributed.fake_world import DTensorSpec

_MOST_KNOWN: Final = 2**13
"""Operators on shapes above which those of earlier simulations are dropped; a simulation adds some dozens."""
_DEVICES: Final = 4
"""Kinds of devices of which metadata is kept."""


@functools.lru_cache(_DEVICES)
def _known_on(kernels: Hashable) -> dict[object, Any]:
    """Return the metadata on devices with the same kernels; empty at first."""
    return {}


def known_metadata(propagate: Callable[..., Any], kernels: Hashable) -> Callable[..., Any]:
    """Return DTensor's propagation of metadata with a cache.

    Args:
        propagate: takes the propagator and the schema of a call.
        kernels: what decides the kernels of the simulated device.
    """
    known = _known_on(kernels)
    if len(known) > _MOST_KNOWN:
        known.clear()

    def call(propagator: Any, schema: Any) -> Any:
        parts: list[object] = [schema.op, torch.get_default_dtype()]
        if not (_describe(schema.args_schema, parts) and _describe(schema.kwargs_schema.items(), parts)):
            return propagate(propagator, schema)
        key = tuple(parts)
        if key not in known:
            known[key] = propagate(propagator, schema)
        found = known[key]
        return list(found) if isinstance(found, list) else found

    return call


def _describe(values: Iterable[Any], parts: list[object]) -> bool:
    """Append everything that the metadata of results depends on; return whether that is complete."""
    for value in values:
        kind = type(value)
        if kind is DTensorSpec:
            meta = value.tensor_meta
            if meta is None or any(type(size) is not int for size in (*meta.shape, *meta.stride)):
                return False
            parts += (value.mesh.device_type, tuple(meta.shape), tuple(meta.stride), meta.dtype)
        elif kind in PLAIN:
            parts += (kind, value)
        elif isinstance(value, list | tuple):
            parts += (kind, len(value))
            if not _describe(value, parts):
                return False
        else:
            return False
    return True
