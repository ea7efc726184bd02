"""Storages of tensors, and those that an operator changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from legoai.runtime.torch_internals.operators import OpOverload, tree_leaves
from legoai.runtime.wrapped import plain_parts


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested arguments or results."""
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def sizes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the storages of this rank's parts of tensors, each with its bytes."""
    storages = (part.untyped_storage() for tensor in tensors for part in plain_parts(tensor))
    return {storage._cdata: storage.nbytes() for storage in storages}


def is_mutable(operator: Any) -> bool:
    """Whether an operator changes an argument; higher-order ones have no schema, and are taken not to."""
    return isinstance(operator, OpOverload) and operator._schema.is_mutable


def changed_by(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[int]:
    """Yield the storages of the arguments that an operator changes."""
    given = dict(zip((parameter.name for parameter in operator._schema.arguments), args, strict=False)) | dict(kwargs)
    for parameter in operator._schema.arguments:
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            yield from sizes(tensors_in(given.get(parameter.name)))
