"""Choice of the attention kernel of a run."""

from __future__ import annotations

import contextlib
import functools

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from legoai.runtime.torch_internals.operators import attention_kernel_of


def attention_kernel(backend: SDPBackend | None) -> contextlib.AbstractContextManager[None]:
    """Return the context in which every scaled dot-product attention uses one kernel; None leaves it to PyTorch.

    Enter it around forward and backward: recomputation calls the kernel in backward.
    """
    return contextlib.nullcontext() if backend is None else sdpa_kernel(backend)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def choice_of_pytorch(
    device: torch.device, dtype: torch.dtype, width: int, of_values: int, requires_grad: bool
) -> SDPBackend:
    """Return the kernel that PyTorch's own attention uses for heads, of those that are allowed here.

    It depends on the device: on GPUs of compute capability 9 and 10 PyTorch tries cuDNN first. The tensors of which
    PyTorch is asked are empty, since dynamo calls this function with constants only.

    Args:
        device: of queries, keys and values.
        dtype: likewise.
        width: features of a head's queries and keys.
        of_values: features of a head's values.
        requires_grad: whether there is a backward.

    Raises:
        RuntimeError: no allowed kernel takes them.
    """
    empty = functools.partial(torch.empty, device=device, dtype=dtype, requires_grad=requires_grad)
    query, value = empty(0, 1, 2, width), empty(0, 1, 2, of_values)
    return SDPBackend(attention_kernel_of(query, query, value))
