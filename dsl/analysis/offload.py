"""Offloading to host memory: parameters, optimizer state and activations."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.unsupported import Unsupported


def offloads(analysis: Analysis, what: str) -> bool:
    """Whether all `parameters`, `optimizer` state or `activations` are in host memory while they are not used.

    The optimizer updates parameters where they are, so its state follows them.
    """
    offload = analysis.plan.offload
    if offload is None:
        return False
    return bool(getattr(offload, what) == "all" or (what == "optimizer" and offload.parameters == "all"))


def supports(analysis: Analysis) -> Iterator[Unsupported]:
    """All activations or none. Amounts of parameters and optimizer state have a rule of their own."""
    offload = analysis.plan.offload
    if offload is not None and offload.activations not in ("none", "all"):
        amount = getattr(offload.activations, "name", offload.activations)
        yield Unsupported(
            analysis.place(offload, "activations"),
            f"`activations = {amount}` of `offload` is not lowered: it places copies between the operations "
            "of one traced graph, which the eager backend does not have",
            "not in this program",
            ("write `all` or `none`",),
        )
