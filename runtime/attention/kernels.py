"""Attention kernels that return the output and the logarithm of the softmax sums."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend

from legoai.runtime.attention.kernel_choice import choice_of_pytorch
from legoai.specs.models.layers import exact_dtype

aten = torch.ops.aten

_HALF_DTYPES = (torch.float16, torch.bfloat16)
"""What the kernels of an accelerator compute in."""
_FLASH_HEAD_DIM = 256
"""The widest head of FlashAttention-2."""
_ALIGNED = 8
"""Features of which a head has a multiple in the kernels of an accelerator."""

Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Inputs(NamedTuple):
    """Arguments of an attention.

    Attributes:
        query: [batch, heads, tokens, head_dim].
        key: [batch, key/value heads, other tokens, head_dim]; the key/value heads divide the heads.
        value: as `key`.
        causal: whether query i sees only the keys 0 to i.
        scale: of the products of query and key.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    causal: bool
    scale: float


class Kernel(Protocol):
    """Attention to a set of keys."""

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result, like `query`, and the logarithm of the sum of exp(score), [batch, heads, tokens]."""

    def backward(self, inputs: Inputs, grad: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor) -> Grads:
        """Return the gradients of queries, keys and values.

        Args:
            inputs: as in forward.
            grad: of the result.
            out: the result for these keys, or for these and others.
            log_sum: for the keys of `out`.
        """


def choose_kernel(query: torch.Tensor, value: torch.Tensor) -> Kernel:
    """Return PyTorch's own choice for these tensors, of the kernels here.

    That is a flash kernel where the device has one for them, but cuDNN's where PyTorch prefers it; and matrix products
    for what neither takes. Flash kernels take heads of one width, on an accelerator of a multiple of 8 features: others
    are padded for them, as PyTorch does, and so are values of fewer features than keys.

    `torch.nn.attention.sdpa_kernel` switches off those that it does not name.
    """
    width, of_values = query.shape[-1], value.shape[-1]
    on_cpu = runs_on_cpu(query.device)
    padded = width if on_cpu else -(-width // _ALIGNED) * _ALIGNED
    fits = on_cpu or query.dtype in _HALF_DTYPES
    if fits and not on_cpu and width == padded and of_values % _ALIGNED == 0 and _cudnn_is_on():
        choice = choice_of_pytorch(query.device, query.dtype, width, of_values, query.requires_grad)
        if choice == SDPBackend.CUDNN_ATTENTION:
            return CudnnKernel()
    if fits and of_values <= width and (on_cpu or width <= _FLASH_HEAD_DIM) and _flash_is_on():
        kernel = CpuFlashKernel() if on_cpu else FlashKernel()
        return kernel if of_values == width == padded else Padded(kernel, padded)
    return MathKernel()


def runs_on_cpu(device: torch.device) -> bool:
    """Whether the kernels of a device are those of a CPU; the simulated device replaces this by its own kind."""
    return device.type == "cpu"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _flash_is_on() -> bool:
    return bool(torch.backends.cuda.flash_sdp_enabled())  # type: ignore[no-untyped-call]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _cudnn_is_on() -> bool:
    return bool(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]


class FlashKernel:
    """FlashAttention-2 on an accelerator."""

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel`."""
        query, key, value, causal, scale = inputs
        out, log_sum, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
        return out, log_sum

    def backward(self, inputs: Inputs, grad: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor) -> Grads:
        """See `Kernel`."""
        query, key, value, causal, scale = inputs
        lengths = (None, None, query.shape[2], key.shape[2])
        random_state = (query.new_zeros(2, dtype=torch.uint64), query.new_zeros(0))  # only dropout would read it
        grad_query, grad_key, grad_value = aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, log_sum, *lengths, 0.0, causal, *random_state, scale=scale
        )
        return grad_query, grad_key, grad_value


class CudnnKernel:
    """cuDNN's attention; its log-sum-exp has a last dimension of 1."""

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel`."""
        query, key, value, causal, scale = inputs
        out, log_sum, *_ = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )
        return out, log_sum.squeeze(-1)

    def backward(self, inputs: Inputs, grad: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor) -> Grads:
        """See `Kernel`."""
        query, key, value, causal, scale = inputs
        random_state = (query.new_zeros((), dtype=torch.int64), query.new_zeros((), dtype=torch.int64))  # for dropout
        lengths = (None, None, query.shape[2], key.shape[2])
        grad_query, grad_key, grad_value = aten._scaled_dot_product_cudnn_attention_backward(
            grad, query, key, value, out, log_sum.unsqueeze(-1), *random_state, None, *lengths, 0.0, causal, scale=scale
        )
        return grad_query, grad_key, grad_value


class CpuFlashKernel:
    """Flash attention on a CPU, in any floating-point dtype."""

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel`."""
        query, key, value, causal, scale = _for_each_head(inputs)
        out, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
        return out, log_sum

    def backward(self, inputs: Inputs, grad: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor) -> Grads:
        """See `Kernel`."""
        query, key, value, causal, scale = _for_each_head(inputs)
        grad_query, grad_key, grad_value = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, log_sum, 0.0, causal, scale=scale
        )
        return grad_query, _summed(grad_key, inputs.key), _summed(grad_value, inputs.key)


class Padded:
    """A kernel for heads of one width, to which queries, keys and values are padded with zeros.

    Zeros behind the features of queries and keys leave their products unchanged.

    Args:
        kernel: for heads of that width.
        width: features of a head.
    """

    def __init__(self, kernel: Kernel, width: int) -> None:
        self.kernel = kernel
        self.width = width

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel`."""
        out, log_sum = self.kernel.forward(self._padded(inputs))
        return out[..., : inputs.value.shape[-1]], log_sum

    def backward(self, inputs: Inputs, grad: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor) -> Grads:
        """See `Kernel`."""
        width, of_values = inputs.query.shape[-1], inputs.value.shape[-1]
        grad, out = self._widened(grad), self._widened(out)
        grad_query, grad_key, grad_value = self.kernel.backward(self._padded(inputs), grad, out, log_sum)
        return grad_query[..., :width], grad_key[..., :width], grad_value[..., :of_values]

    def _padded(self, inputs: Inputs) -> Inputs:
        query, key, value = (self._widened(tensor) for tensor in inputs[:3])
        return inputs._replace(query=query, key=key, value=value)

    def _widened(self, tensor: torch.Tensor) -> torch.Tensor:
        more = self.width - tensor.shape[-1]
        return F.pad(tensor, (0, more)) if more else tensor


class MathKernel:
    """Attention by plain matrix products, with all scores in memory: for dtypes and devices without a flash kernel."""

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel`."""
        whole = _for_each_head(inputs)
        scores = _scores(whole)
        log_sum = scores.logsumexp(-1)
        return (scores - log_sum.unsqueeze(-1)).exp().to(whole.value.dtype) @ whole.value, log_sum

    def backward(self, inputs: Inputs, grad: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor) -> Grads:
        """See `Kernel`."""
        whole = _for_each_head(inputs)
        shares = (_scores(whole) - log_sum.unsqueeze(-1)).exp()
        grad_shares = (grad @ whole.value.mT).to(shares.dtype)
        through_sum = (grad.to(shares.dtype) * out).sum(-1, keepdim=True)
        grad_scores = (shares * (grad_shares - through_sum) * whole.scale).to(grad.dtype)
        grad_key, grad_value = grad_scores.mT @ whole.query, shares.to(grad.dtype).mT @ grad
        return grad_scores @ whole.key, _summed(grad_key, inputs.key), _summed(grad_value, inputs.key)


def _scores(inputs: Inputs) -> torch.Tensor:
    """Scaled and masked, in fp32 or higher: [batch, heads, tokens, other tokens]."""
    products = inputs.query @ inputs.key.mT
    scores = products.to(exact_dtype(products)) * inputs.scale
    if inputs.causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def _for_each_head(inputs: Inputs) -> Inputs:
    """Repeat each key/value head for the query heads that share it."""
    shared = inputs.query.shape[1] // inputs.key.shape[1]
    if shared == 1:
        return inputs
    key, value = (item.repeat_interleave(shared, dim=1) for item in (inputs.key, inputs.value))
    return inputs._replace(key=key, value=value)


def _summed(grad: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Add the gradients of the query heads that share a key/value head."""
    if grad.shape[1] == key.shape[1]:
        return grad
    return grad.reshape(len(grad), key.shape[1], -1, *grad.shape[2:]).sum(2)
