"""Predictability of node times in a traced step: whether the catalogue has the plan's devices and fabric."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.specs.span import Span


def unpriced(analysis: Analysis) -> Iterator[tuple[Span, str, str]]:
    """Yield the parts of the cluster whose speed a program does not know: span, name, and reason."""
    cluster = analysis.plan.cluster
    if cluster.device == "profile":
        yield (
            analysis.span_of(cluster, "profile"),
            "a profile",
            "a program does not know where the device's profile lies",
        )
    if cluster.hosts > 1 and cluster.fabric is None:
        yield analysis.span_of(cluster, "hosts"), "a cluster without a fabric", "it has no network between its hosts"
    unmeasured = cluster.unmeasured_fabric
    if unmeasured is not None:
        yield analysis.span_of(cluster, "fabric"), f"`{unmeasured}`", "nothing is known of its speed"
