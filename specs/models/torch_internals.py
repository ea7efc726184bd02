"""Private names of torch that describing a model needs; all others stand in :mod:`legoai.runtime.torch_internals`."""

import torch

# Class of `torch.ops.aten.add.Tensor`, for annotations.
from torch._ops import OpOverload

# Base class of batch normalisation in any number of dims.
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

# Base class of dropout in any number of dims, and of its variants.
from torch.nn.modules.dropout import _DropoutNd as Dropout

# The documented way to see operators below autograd; torch has it only under a private name.
from torch.utils._python_dispatch import TorchDispatchMode

# Nested arguments and results; only torch's own trees know the outputs of Hugging Face's models.
from torch.utils._pytree import tree_leaves, tree_map


def import_compiler() -> None:
    """Import torch's compiler, as the first operator on the meta device that is written in Python would.

    Inside of a dispatch mode that import fails half-way: the mode sees operators that the compiler defines.
    """
    import torch._dynamo  # noqa: F401


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that a storage has alone while it lives, also on the meta device, where its address is 0."""
    key: int = storage._cdata
    return key


def whole_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor of which this one is a view; None where it is none."""
    return tensor._base


# What a torch-function mode gets for `tensor.is_meta`.
IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]

__all__ = [
    "IS_META",
    "BatchNorm",
    "Dropout",
    "OpOverload",
    "TorchDispatchMode",
    "import_compiler",
    "storage_key",
    "tree_leaves",
    "tree_map",
    "whole_of",
]
