"""Offloading to host memory: parameters, optimizer state and activations."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.memory_limit import how_to_limit
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.unsupported import Unsupported
from legoai.specs.directives.base import name_of


def offloads(analysis: Analysis, what: str) -> bool:
    """Whether all `parameters`, `optimizer` state or `activations` are in host memory while they are not used.

    The optimizer updates parameters where they are, so its state follows them.
    """
    offload = analysis.plan.offload
    if offload is None:
        return False
    return bool(getattr(offload, what) == "all" or (what == "optimizer" and offload.parameters == "all"))


def offloads_some(analysis: Analysis, what: str) -> bool:
    """Whether at least some `parameters`, `optimizer` state or `activations` leave the device."""
    offload = analysis.plan.offload
    return offload is not None and bool(getattr(offload, what) != "none")


def supports(analysis: Analysis) -> Iterator[Unsupported]:
    """All activations or none, and of a graph so many bytes of them.

    Amounts of parameters and optimizer state have a rule of their own.
    """
    offload = analysis.plan.offload
    if offload is None or offload.activations in ("none", "all"):
        return
    if is_traced(analysis):
        if offload.activations == "adaptive" and analysis.plan.memory_limit is None:
            yield Unsupported(analysis.span_of(offload, "activations"), *without_limit(analysis, "activations"))
    else:
        amount = name_of(offload.activations)
        yield Unsupported(
            analysis.span_of(offload, "activations"),
            f"`activations = {amount}` of `offload` is not lowered: it places copies between the operations "
            "of one traced graph, which the eager backend does not have",
            "not in this program",
            ("write `all` or `none`, or `fsdp … (backend = graph)`",),
        )


def without_limit(analysis: Analysis, what: str) -> tuple[str, str, tuple[str, ...]]:
    """Message, label and help for an adaptive amount where the plan states no limit of active memory."""
    return (
        f"`{what} = adaptive` of `offload` is not lowered without a limit of active memory, which decides what leaves",
        "what is the limit?",
        (how_to_limit(analysis.plan), "write `all` or `bytes(n)`"),
    )
