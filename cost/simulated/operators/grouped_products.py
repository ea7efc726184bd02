"""Grouped products without a grouped kernel: one product for each group.

`aten::_grouped_mm` has a kernel for bf16 on GPUs of compute capability 9 and 10 (`_grouped_mm_cuda` in
`aten/src/ATen/native/cuda/GroupedBlas.cpp`). On other devices, and for fp32 and fp16, it copies the ends of the groups
to the host, and multiplies one group after another (`aten/src/ATen/native/GroupedMMUtils.h`, `_grouped_mm_fallback`).
Its fake kernel supports bf16 only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from legoai.cost.simulated.device import read_from_device
from legoai.cost.simulated.operators.routing import even_parts
from legoai.runtime.torch_internals.operators import OpOverload
from legoai.specs.cluster import Device

_GROUPED: Final = torch.ops.aten._grouped_mm.default

_CAPABILITIES: Final = ("9", "10")
"""Major compute capabilities of GPUs that have a grouped kernel."""
_ALIGNMENT: Final = 16
"""Bytes of which strides of arguments must be multiples, and to which rows of the result are padded."""


def has_grouped_kernel(kind: str, gpu: Device | None) -> bool:
    """Whether a device has a kernel of grouped products; assumed where its compute capability is not stated.

    Args:
        kind: of the device, `cuda` or `cpu`.
        gpu: the device; None where it is not known.
    """
    if kind != "cuda":
        return False
    capability = gpu.compute_capability if gpu is not None else None
    return capability is None or has_kernel_of_capability(capability)


def has_kernel_of_capability(capability: str) -> bool:
    """Whether GPUs of a compute capability, such as `9.0`, have a kernel of grouped products."""
    return capability.partition(".")[0] in _CAPABILITIES


def is_by_group(func: OpOverload, args: Sequence[Any], *, kernel: bool) -> bool:
    """Whether a call is a grouped product that is computed group by group.

    Args:
        func: the operator.
        args: of the call.
        kernel: whether the device has a grouped kernel.
    """
    return func is _GROUPED and not (kernel and args[0].dtype == torch.bfloat16)


def products(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply group by group, as `aten::_grouped_mm` does; groups have equal numbers of rows, to within one.

    Args:
        left: [rows, k] or [groups, rows, k].
        right: [k, columns] or [groups, k, columns].
        offs: int32 [groups]: ends of the groups along the dim that both arguments, or one of them, divide among groups;
            None for two stacks.
        bias: None, as there.
        out_dtype: by default the dtype of the arguments.

    Raises:
        RuntimeError: PyTorch refuses the strides.
    """
    assert bias is None, "PyTorch refuses one"
    for item in (left, right):
        if max(item.stride()[-2:]) * item.itemsize % _ALIGNMENT:
            raise RuntimeError(f"strides of a grouped product must be multiples of {_ALIGNMENT} bytes")
    dtype = left.dtype if out_dtype is None else out_dtype
    stacks = left.dim() == 3, right.dim() == 3
    if offs is None:
        return torch.bmm(left, right, out=_empty((*left.shape[:2], right.shape[2]), left, dtype))
    read_from_device(offs.numel() * offs.itemsize)
    groups = len(offs)
    if not any(stacks):
        out = _empty((groups, left.shape[0], right.shape[1]), left, dtype)
        parts = zip(_parts(left, groups, 1), _parts(right, groups, 0), out.unbind(), strict=True)
    elif stacks[1]:
        out = _empty((left.shape[0], right.shape[2]), left, dtype)
        parts = zip(_parts(left, groups, 0), right.unbind(), _parts(out, groups, 0), strict=True)
    else:
        out = _empty((left.shape[1], right.shape[1]), left, dtype)
        parts = zip(left.unbind(), _parts(right, groups, 1), _parts(out, groups, 1), strict=True)
    for one, other, result in parts:
        torch.mm(one, other, out=result)
    return out


def _parts(tensor: torch.Tensor, count: int, dim: int) -> tuple[torch.Tensor, ...]:
    return torch.split(tensor, even_parts(tensor.shape[dim], count), dim)


def _empty(shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a result whose rows are padded."""
    padded = -(-shape[-1] * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT // dtype.itemsize
    strides = (shape[-2] * padded, padded, 1)[-len(shape) :]
    return torch.empty_strided(shape, strides, dtype=dtype, device=like.device)
