"""Kernels of the simulated device for attention, normalisation and convolution."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend

from legoai.cost.simulated.device import Kind, SimulationError
from legoai.cost.simulated.operators.properties import convolves_channels_last
from legoai.dsl.analysis.computation.attention import takes_widths
from legoai.runtime.attention import kernels as attention_kernels
from legoai.runtime.torch_internals.fake_tensors import FakeTensorMode
from legoai.runtime.torch_internals.operators import allowed_attention_kernels
from legoai.runtime.torch_internals.patching import original, patched_attribute, patched_item

aten = torch.ops.aten

_FAKES: Final = "torch._subclasses.fake_impls:op_implementations_dict"

_ONE_KERNEL: Final[dict[Kind, tuple[str, ...]]] = {
    "cuda": ("_fused_rms_norm", "silu_backward", "mish_backward"),
    "cpu": ("silu_backward", "mish_backward"),
}
"""Operators that are a single kernel on the kind of device, and would be decomposed on a device without that kernel."""

_CUDNN_FIRST: Final = ("9", "10")
"""Major compute capabilities on which PyTorch tries cuDNN first (`check_prefer_cudnn_attention` of the file below)."""
_ORDER: Final = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.CUDNN_ATTENTION,
)
_ORDER_WITH_CUDNN_FIRST: Final = (SDPBackend.CUDNN_ATTENTION, *_ORDER[:-1])


@contextlib.contextmanager
def kernels_of(kind: Kind, capability: str | None) -> Iterator[None]:
    """Run attention, normalisation and convolution as the kernels of a device, with the tensors that they save.

    Args:
        kind: of the device.
        capability: compute capability of a GPU; None where it is not known.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    attend = functools.partial(_attend_on_gpu, capability) if kind == "cuda" else _attend_on_cpu
    library.impl("scaled_dot_product_attention", attend, "AutogradPrivateUse1")  # type: ignore[no-untyped-call]
    if kind == "cpu":
        library.impl("dropout", _drop_on_cpu, "AutogradPrivateUse1")  # type: ignore[no-untyped-call]
    if kind == "cuda":
        chosen = functools.partial(_number_of_choice, capability)
        library.impl("_fused_sdp_choice", chosen, "AutogradPrivateUse1")  # type: ignore[no-untyped-call]
    for name in _ONE_KERNEL[kind]:
        library.impl(name, _never_computed, "PrivateUse1")  # type: ignore[no-untyped-call]
    on_cpu = patched_attribute(attention_kernels, "runs_on_cpu", lambda _: kind == "cpu")
    try:
        with on_cpu, _convolving_on_gpu() if kind == "cuda" else contextlib.nullcontext():
            yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _convolving_on_gpu() -> Iterator[None]:
    """Let convolutions and their gradients have their channels last where those of images or weights are, as in cuDNN.

    torch chooses the layout by the device's type, and so would have contiguous results here.
    """
    fakes: dict[Any, Callable[..., Any]] = original(_FAKES)

    def convolving(contiguous: Callable[..., Any], first: int) -> Callable[..., Any]:
        """Return the fake of an operator whose images and weight are arguments from one on."""

        def convolved(mode: FakeTensorMode, function: Any, *args: Any, **kwargs: Any) -> Any:
            out = contiguous(mode, function, *args, **kwargs)
            images, weight = args[first : first + 2] if args else (kwargs["input"], kwargs["weight"])
            if not convolves_channels_last(images, weight):
                return out
            with mode:
                if isinstance(out, torch.Tensor):
                    return torch.empty_like(out, memory_format=torch.channels_last)
                *gradients, of_bias = out
                last = (
                    None if item is None else torch.empty_like(item, memory_format=torch.channels_last)
                    for item in gradients
                )  # fmt: skip
                return (*last, of_bias)

        return convolved

    with contextlib.ExitStack() as stack:
        for operator, first in ((aten.convolution.default, 0), (aten.convolution_backward.default, 1)):
            stack.enter_context(patched_item(_FAKES, operator, convolving(fakes[operator], first)))
        yield


def _never_computed(*_: Any, **__: Any) -> Any:
    raise SimulationError("the simulated device computes no values")


def _attend_on_gpu(  # noqa: PLR0917 (PyTorch's own signature)
    capability: str | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`scaled_dot_product_attention` by the kernel of `_choice_on_gpu`."""
    kernel = _choice_on_gpu(capability, query, key, value, attn_mask, is_causal=is_causal)
    if kernel == SDPBackend.MATH:
        return _math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if kernel == SDPBackend.FLASH_ATTENTION:
        width = query.shape[-1]
        pad = -width % 8
        if pad:
            scale = 1 / math.sqrt(width) if scale is None else scale
            query, key, value = (torch.nn.functional.pad(item, (0, pad)) for item in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :width] if pad else out
    grad = torch.is_grad_enabled() and any(item.requires_grad for item in (query, key, value))
    mask = _float_mask(attn_mask, query)
    if kernel == SDPBackend.EFFICIENT_ATTENTION:
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, grad, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_cudnn_attention(
        query, key, value, mask, grad, dropout_p, is_causal, False, scale=scale
    )[0]


def _choice_on_gpu(  # noqa: PLR0917 (PyTorch's own signature)
    capability: str | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> SDPBackend:
    """The first allowed kernel that can compute an attention, in PyTorch's order for CUDA, as `_fused_sdp_choice`.

    The conditions are those of `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`. With cuDNN above 9.15.1, which
    torch 2.11 and later bring along, PyTorch tries cuDNN's kernel first on GPUs of compute capability 9 and 10, as was
    seen on an H100, and elsewhere last.
    """
    allowed = allowed_attention_kernels()
    half = query.dtype in (torch.float16, torch.bfloat16)
    batched = _is_batched(query, key, value)
    grouped = batched and query.shape[-3] != key.shape[-3]
    widths = query.shape[-1], value.shape[-1]

    def takes(kernel: str) -> bool:
        return batched and takes_widths(kernel, widths, capability=capability, dtype="bf16" if half else "fp32")

    square = not is_causal or query.shape[-2] == key.shape[-2]
    learned = attn_mask is not None and attn_mask.requires_grad  # of which cuDNN has no gradient
    fits = {
        SDPBackend.FLASH_ATTENTION: half and attn_mask is None and square and takes("flash"),
        SDPBackend.EFFICIENT_ATTENTION: not grouped and takes("efficient"),
        SDPBackend.CUDNN_ATTENTION: half and not learned and key.shape[-2] != 1 and takes("cudnn"),
        SDPBackend.MATH: True,
    }
    first = capability is None or capability.partition(".")[0] in _CUDNN_FIRST
    for kernel in _ORDER_WITH_CUDNN_FIRST if first else _ORDER:
        if kernel in allowed and fits[kernel]:
            return kernel
    names = ", ".join(sorted(backend.name for backend in allowed))
    raise SimulationError(f"no attention kernel of {names} takes {tuple(query.shape)} {query.dtype}")


def _number_of_choice(capability: str | None, *args: Any, **kwargs: Any) -> int:
    """`_fused_sdp_choice`, which attention to the pieces of a sequence asks."""
    return _choice_on_gpu(capability, *args, **kwargs).value


def _attend_on_cpu(  # noqa: PLR0917 (PyTorch's own signature)
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`scaled_dot_product_attention` as `aten/src/ATen/native/transformers/attention.cpp` does it on a CPU."""
    flash = SDPBackend.FLASH_ATTENTION in allowed_attention_kernels()
    alike = query.shape[-1] == value.shape[-1]
    # The CPU kernel's backward computes no gradient of the mask, for example of a learned bias.
    learned = attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled()
    if flash and alike and not dropout_p and _is_batched(query, key, value) and not learned:
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=_float_mask(attn_mask, query), scale=scale
        )[0]
    return _math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _drop_on_cpu(values: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """`dropout` as `aten/src/ATen/native/Dropout.cpp` does it where no kernel is fused: noise of the same dtype."""
    if not p or not train or not values.numel():
        return values
    noise = torch.empty_like(values)
    return values * noise.bernoulli_(1 - p).div_(1 - p)


def _is_batched(*tensors: torch.Tensor) -> bool:
    """Whether tensors are [batch, heads, tokens, width], which all kernels but products and a softmax require."""
    return all(tensor.dim() == 4 for tensor in tensors)


def _math_attention(*args: Any, **kwargs: Any) -> Any:
    return aten._scaled_dot_product_attention_math(*args, **kwargs)[0]


def _float_mask(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
