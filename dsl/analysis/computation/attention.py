"""Attention: the modules that compute it, and its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.unsupported import Unsupported
from legoai.specs.directives.hole import Hole

KERNELS: Final = ("default", "flash", "efficient", "cudnn", "math")
"""Kernels of ``scaled_dot_product_attention``, which the models call."""

_LARGEST_CUDNN_HEAD: Final = 128
_LATENT_HEAD: Final = (192, 128)
"""Features of keys and of values of DeepSeek's heads, for which cuDNN has a kernel of its own."""
_LATENT_CAPABILITIES: Final = ("9.0", "10.0", "10.3")
"""Compute capabilities of the GPUs on which it has it."""


def takes_widths(kernel: str, widths: tuple[int, int], *, capability: str | None) -> bool:
    """Whether a kernel of `KERNELS` takes heads whose values have another width than their keys.

    The conditions are those of `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`, for bf16 and fp16; that of
    `flash` is a CPU's too.

    Args:
        kernel: its name.
        widths: features of a head's queries and keys, and of its values.
        capability: compute capability of the GPU; one that has the most kernels is assumed where it is not known.
    """
    if kernel == "flash":
        return widths[0] == widths[1]
    if kernel not in ("efficient", "cudnn"):
        return True
    if any(width % 8 for width in widths):
        return False
    if kernel == "efficient" or max(widths) <= _LARGEST_CUDNN_HEAD:
        return True
    return widths == _LATENT_HEAD and has_latent_kernel(capability)


def has_latent_kernel(capability: str | None) -> bool:
    """Whether cuDNN has a kernel for DeepSeek's heads on a GPU; assumed where its compute capability is not known."""
    return capability is None or capability in _LATENT_CAPABILITIES


@fact
def attention_modules(analysis: Analysis) -> dict[str, frozenset[str]]:
    """The modules that attend in their own forward, in model order, with the functions by which they do."""
    assert analysis.manifest is not None
    modules = analysis.manifest.modules
    found: dict[int, frozenset[str]] = {}
    names: dict[str, frozenset[str]] = {}
    for path in modules:
        template = analysis.manifest.template_of(path)
        if template not in found:
            found[template] = frozenset(step.name for step in modules[path].flow if step.op == "attention")
        if found[template]:
            names[path] = found[template]
    return names


def attention_heads(analysis: Analysis, path: str) -> dict[str, int]:
    """The heads of queries and of keys with which an attention module calls attention, as `n_heads` and `n_kv_heads`.

    Where no call of tensors with heads is recorded, they are those of its attributes; 0 for unknown.
    """
    assert analysis.manifest is not None
    info = analysis.manifest.modules[path]
    call = next(iter(info.attention_calls), None)
    if call is not None and call.misfit() is None:
        return {"n_heads": call.queries[1], "n_kv_heads": call.keys[1]}
    return {name: int(info.attributes.get(name, 0)) for name in ("n_heads", "n_kv_heads")}


@fact
def possible_kernels(analysis: Analysis) -> frozenset[str]:
    """The kernels that the plan may use: the one that it names, or those with which its hole may be answered."""
    kernel = analysis.plan.attention.kernel
    if isinstance(kernel, Hole):
        return frozenset(KERNELS if kernel.domain is None else map(str, kernel.domain))
    return frozenset({kernel})


def supports(analysis: Analysis) -> Iterator[Unsupported]:
    """The kernels of ``scaled_dot_product_attention``."""
    attention = analysis.plan.attention
    if attention.kernel not in KERNELS:
        yield Unsupported(
            analysis.span_of(attention, "kernel"),
            f"`attention {attention.kernel}` is not lowered yet: the models call `scaled_dot_product_attention`, which "
            "has no such kernel",
            help=(f"lowered are {', '.join(f'`{name}`' for name in KERNELS)}",),
        )
