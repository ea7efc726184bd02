"""Private names of torch that describing a model needs; all others stand in :mod:`legoai.runtime.torch_internals`."""

# Base class of batch normalisation in any number of dims.
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

# Nested arguments and results; only torch's own trees know the outputs of Hugging Face's models.
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["BatchNorm", "tree_leaves", "tree_map"]
