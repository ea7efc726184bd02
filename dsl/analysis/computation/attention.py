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
            analysis.place(attention, "kernel"),
            f"`attention {attention.kernel}` is not lowered yet: the models call `scaled_dot_product_attention`, which "
            "has no such kernel",
            help=(f"lowered are {', '.join(f'`{name}`' for name in KERNELS)}",),
        )
