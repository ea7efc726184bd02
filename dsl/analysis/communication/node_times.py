"""Predictability of node times in a traced step: whether the catalogue has the plan's devices and fabric."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.specs.cluster import CatalogueError, fabric
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
    if cluster.hosts > 1 and cluster.fabric is not None and not _is_known(cluster.fabric):
        yield analysis.span_of(cluster, "fabric"), f"`{cluster.fabric}`", "nothing is known of its speed"


def _is_known(name: str) -> bool:
    try:
        return fabric(name).figure("bandwidth_bytes_per_second") > 0
    except CatalogueError:
        return False
