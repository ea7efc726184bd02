"""Attention: the modules that compute it, and its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.unsupported import Unsupported
from legoai.specs.directives.hole import Hole
from legoai.specs.models.manifests.manifest import ModuleInfo

KERNELS: Final = ("default", "flash", "efficient", "cudnn", "math")
"""Kernels of ``scaled_dot_product_attention``, which the models call."""

_LATENT_HEAD: Final = (192, 128)
"""Features of keys and of values of DeepSeek's heads, for which cuDNN has a kernel of its own."""
_ALIGNED: Final = {"bf16": 8, "fp16": 8}
"""Features of which a head has a multiple, by dtype, for kernels that load aligned vectors; of others, 4."""


def takes_widths(kernel: str, widths: tuple[int, int], *, capability: str | None, dtype: str = "bf16") -> bool:
    """Whether a kernel of `KERNELS` takes heads of these widths on a CUDA device.

    The conditions are those of `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`.

    Args:
        kernel: its name.
        widths: features of a head's queries and keys, and of its values.
        capability: compute capability of the GPU; one that has the most kernels is assumed where it is not known.
        dtype: of queries, keys and values.
    """
    largest = largest_head(kernel, widths, capability=capability)
    if largest is not None and max(widths) > largest:
        return False
    if kernel == "flash":
        return widths[0] == widths[1]  # PyTorch pads others than multiples of 8
    return not any(width % head_multiple(kernel, dtype) for width in widths)


def largest_head(kernel: str, widths: tuple[int, int], *, capability: str | None) -> int | None:
    """The most features of a head that a kernel takes, None for any number. Arguments are those of `takes_widths`."""
    if kernel == "flash":
        return 256
    if kernel != "cudnn":
        return None
    if capability is None or capability == "9.0":
        return 256
    latent = capability.partition(".")[0] == "10" and widths == _LATENT_HEAD
    return max(widths) if latent else 128


def head_multiple(kernel: str, dtype: str) -> int:
    """The features of which a kernel's heads have a multiple."""
    return _ALIGNED.get(dtype, 4) if kernel in ("efficient", "cudnn") else 1


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


def head_widths(attention: ModuleInfo) -> tuple[int, int]:
    """Return the features of a head's queries and keys, and of its values."""
    width = int(attention.attributes["head_dim"])
    return width, int(attention.attributes.get("v_head_dim", width))


def attention_widths(analysis: Analysis, path: str) -> tuple[int, int] | None:
    """The features of an attention module's heads, of queries and keys and of values; None where they are not known.

    Where its attributes do not say, they are those with which it calls attention, values as wide as keys.
    """
    assert analysis.manifest is not None
    info = analysis.manifest.modules[path]
    if "head_dim" in info.attributes:
        return head_widths(info)
    call = next(iter(info.attention_calls), None)
    return None if call is None or not call.queries else (call.queries[-1], call.queries[-1])


def attention_dtypes(analysis: Analysis, path: str) -> frozenset[str]:
    """The dtypes in which an attention module attends on a GPU: the plan's, and those to which the model itself casts.

    Autocast leaves fp64 as it is. Where no call is recorded, the dtype is the plan's.
    """
    assert analysis.manifest is not None
    param, calls = analysis.plan.precision.param, analysis.manifest.modules[path].attention_calls
    if param == "fp64" or not calls:
        return frozenset({param})
    return frozenset(call.casts or param for call in calls)


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
