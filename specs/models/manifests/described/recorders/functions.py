"""Torch functions as a forward calls them: names, operations, and the tensors that they take and give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from legoai.specs.models.manifests.manifest import StepOp
from legoai.specs.models.torch_internals import tree_leaves

_FUNCTIONS: Mapping[StepOp, str] = {
    "add": "add radd iadd sub rsub isub subtract addcmul add_ lerp",
    "mul": "mul rmul imul multiply div rdiv truediv rtruediv itruediv divide neg square pow rpow rsqrt sqrt",
    "matmul": "linear matmul rmatmul mm bmm addmm baddbmm einsum grouped_mm bilinear conv1d conv2d conv3d",
    "attention": "scaled_dot_product_attention multi_head_attention_forward flex_attention",
    "activation": "relu relu6 silu gelu sigmoid tanh elu selu celu leaky_relu prelu softplus mish hardswish"
    " hardsigmoid hardtanh glu logsigmoid softsign exp dropout",
    "normalize": "layer_norm rms_norm group_norm batch_norm instance_norm normalize",
    "softmax": "softmax log_softmax",
    "reduce": "sum mean amax amin max min argmax argmin var std norm prod all any cumsum logsumexp one_hot bincount",
    "reshape": "view reshape view_as reshape_as transpose swapaxes permute movedim flatten unflatten ravel squeeze"
    " unsqueeze expand expand_as broadcast_to contiguous chunk split tensor_split unbind cat concat stack hstack repeat"
    " tile flip roll repeat_interleave T mT H mH t view_as_real real imag clone detach pad",
    "index": "getitem setitem index index_select gather scatter scatter_add index_add index_copy index_put take"
    " take_along_dim embedding topk sort argsort where masked_fill masked_scatter masked_select tril triu narrow",
    "cast": "to type type_as float double half bfloat16 int long bool",
}
_OPS: Mapping[str, StepOp] = {name: op for op, names in _FUNCTIONS.items() for name in names.split()}


def operation_of(name: str) -> StepOp:
    """Return what a torch function does, by its name."""
    return _OPS.get(name, "other")


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested arguments or results."""
    found: list[torch.Tensor] = []
    _add_tensors(values, found)
    return found


def _add_tensors(value: Any, found: list[torch.Tensor]) -> None:
    """Add the tensors of a value; those of torch's own trees, whose flattening takes longer, for other classes."""
    kind = type(value)
    if kind is tuple or kind is list:
        for item in value:
            _add_tensors(item, found)
    elif kind is dict:
        for item in value.values():
            _add_tensors(item, found)
    elif isinstance(value, torch.Tensor):
        found.append(value)
    elif kind not in _WITHOUT_TENSORS:
        found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


_WITHOUT_TENSORS: Final = frozenset({int, float, bool, str, type(None), slice, torch.dtype, torch.device, torch.Size})
"""Classes of common arguments."""


def function_name(func: Any) -> str:
    """Return the plain name of a torch function, method (`__radd__`, `mul_`) or property (`T.__get__`)."""
    name: str = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        name = getattr(func.__self__, "__name__", name)
    return name.strip("_")


def takes_only_shape(name: str) -> bool:
    """Whether a function such as `zeros_like` or `new_full` has nothing but shape and dtype from its argument."""
    return name.endswith("_like") or name.startswith("new_")


def writes(func: Any) -> bool:
    """Whether a torch function writes to its first argument: `x[i] = y`, `x.copy_(y)`, `x += y`."""
    name: str = getattr(func, "__name__", "")
    return name in _WRITING or (name.endswith("_") and not name.startswith("__"))


_OPERATORS = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_WRITING = frozenset(["__setitem__", *(f"__i{name}__" for name in _OPERATORS)])
