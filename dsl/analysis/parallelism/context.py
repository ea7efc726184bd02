"""Context parallelism: the attention that it covers, and the supported kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.computation.attention import KERNELS as ATTENTION_KERNELS
from legoai.dsl.analysis.computation.attention import attention_modules
from legoai.dsl.analysis.facts import name_of
from legoai.dsl.analysis.model import help_to_follow
from legoai.dsl.analysis.unsupported import Unsupported
from legoai.specs.plan import Plan

KERNELS: Final = ("default", "flash", "cudnn", "math")
"""Kernels for which ``legoai.runtime.attention.kernels`` returns the log-sum-exp."""


def parts_of_heads(plan: Plan) -> int:
    """Ranks that share the heads of an attention which `tp` cuts: those of `tp`, and of `cp` where it attends by heads.

    Raises:
        Undecided: the number of ranks, or how they share sequences, is a hole.
    """
    mesh, context = plan.mesh, plan.context
    by_heads = context is not None and mesh.cp > 1 and context.rotate == "heads"
    return mesh.tp * (mesh.cp if by_heads else 1)


def busiest_rank(plan: Plan) -> int:
    """Return the rank of the first pipeline stage with the most work.

    It is the first, whose shards are the longest where a length is not divisible. But of the ranks of `cp` among which
    keys are communicated it is the last: where each rank has one piece of the sequence it attends to all pieces before
    it, and where each has a piece of the head and one of the tail, products are equal, but the last merges results for
    both of its pieces, and the first for one.
    """
    mesh, context = plan.mesh, plan.context
    communicates_keys = context is not None and context.rotate != "heads"
    return (mesh.cp - 1) * mesh.stride("cp") if communicates_keys else 0


def supports(analysis: Analysis) -> Iterator[Unsupported]:
    """Supported is ``scaled_dot_product_attention``; where keys are communicated, with the kernels above."""
    context, attention, manifest = analysis.plan.context, analysis.plan.attention, analysis.manifest
    if context is None or analysis.plan.mesh.cp == 1:
        return
    merges = context.rotate != "heads"
    if merges and attention.kernel in ATTENTION_KERNELS and attention.kernel not in KERNELS:
        yield Unsupported(
            analysis.span_of(attention, "kernel"),
            f"`attention {attention.kernel}` is not lowered together with `context`, which merges what the kernels of "
            f"{', '.join(f'`{name}`' for name in KERNELS)} give",
        )
    if manifest is None:
        return
    if manifest.flow_error is not None:
        yield Unsupported(
            analysis.span_of(context),
            f"the model could not be followed, so its attention is not known: {manifest.flow_error}",
            help=help_to_follow(analysis),
        )
    for path, names in attention_modules(analysis).items():
        if names != {"scaled_dot_product_attention"}:
            yield Unsupported(
                analysis.span_of(context),
                f"`{name_of(path)}` attends by `{'`, `'.join(sorted(names))}`; context parallelism is for "
                "`scaled_dot_product_attention`",
            )
            return
