"""Update of a profile's collectives by the measurements of a run, on one host and between hosts."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from legoai.cost.calibration.correction import Correction, Typical
from legoai.cost.calibration.observed.collectives import CollectiveTimes
from legoai.cost.calibration.update import Document, Part, corrected
from legoai.cost.machine.collective_time import Network, seconds_on
from legoai.cost.measurements.file import ProfileError
from legoai.cost.network.topology import Placement
from legoai.cost.profiles import Profile
from legoai.cost.trace.records import CollectiveKind


def update_links(
    document: Document, base: Profile, found: CollectiveTimes, network: Network, *, on_device: bool
) -> list[Part]:
    """Update collectives in place.

    Of equal collectives the minimum is used on a GPU, as other work there could only slow them down; on a CPU it is the
    median, as in a calibration, except for collectives whose waiting time is not known.
    """
    matched: dict[tuple[CollectiveKind, Placement], dict[int, list[float]]] = defaultdict(dict)
    waited: dict[tuple[CollectiveKind, Placement], dict[int, list[float]]] = defaultdict(dict)
    for groups, seen in ((matched, found.seconds), (waited, found.waited)):
        for (kind, on, size), times in seen.items():
            groups[kind, on][size] = times
    parts = []
    for kind, on in sorted({*matched, *waited}, key=str):
        sizes = matched.get((kind, on)) or waited[kind, on]
        if on_device:  # the minimum covers both
            sizes = {**waited.get((kind, on), {}), **sizes}
        typical: Typical = min if on_device or (kind, on) not in matched else statistics.median
        one = _Observed(kind, on, sizes, typical)
        if on.hosts == 1:
            parts.append(_inside(document, base, one, network))
        elif on.short:
            parts.append(one.kept("over hosts with different numbers of its ranks, for which there are no tables"))
        elif network.fabric is None:
            parts.append(one.kept("over several hosts, between which the base has no fabric"))
        else:
            parts.append(_between(document, base, one, network))
    return parts


class _Observed(NamedTuple):
    """Measurements of one collective at one placement: its seconds by size, and the statistic of equal ones."""

    kind: CollectiveKind
    on: Placement
    sizes: dict[int, list[float]]
    typical: Typical

    @property
    def name(self) -> str:
        if self.on.hosts == 1:
            return f"links {self.kind} of {self.on.ranks}"
        on_each = f"{self.on.fewest} to {self.on.per_host}" if self.on.short else str(self.on.per_host)
        return f"fabric {self.kind} of {self.on.hosts} x {on_each}"

    def kept(self, how: str) -> Part:
        """Return the part with the base's figures."""
        return Part(name=self.name, seen=len(self.sizes), result="kept", how=how, trial=None)

    def corrected(self, before: Callable[[float], float]) -> tuple[Part, Correction | None]:
        """Return the part, and the correction of the base's times by size."""
        measured = sorted(self.sizes.items())
        return corrected(self.name, measured, before, float, octaves=0.0, typical=self.typical)


def _inside(document: Document, base: Profile, seen: _Observed, network: Network) -> Part:
    """Correct the curve of one collective for a number of ranks of one host."""
    kind, on = seen.kind, seen.on

    def before(size: float) -> float:
        return seconds_on(on, kind, size, network, base)[0]

    try:
        before(next(iter(seen.sizes)))
    except ProfileError:
        return seen.kept("the base has no collectives to correct")
    part, correction = seen.corrected(before)
    if correction is None:
        return part
    near = _nearest(document["links"], kind, on.ranks)
    known = [float(size) for size, _ in near.get("points", ())] or [2.0**power for power in range(10, 31)]
    grid = sorted({*known, *map(float, seen.sizes)})
    limit, steepness, middle = near["sigmoid"]
    document["links"].setdefault(kind, {})[str(on.ranks)] = {
        "sigmoid": [limit / correction.at(grid[-1] * 2**10), steepness, middle],
        "latency": near["latency"] * correction.at(1.0),
        "points": [[size, before(size) * correction.at(size)] for size in grid],
        "derived": "",
    }
    return part


def _nearest(links: Document, kind: CollectiveKind, ranks: int) -> dict[str, Any]:
    """Return the curve to correct: that of the collective, or of the one that the base uses instead."""
    curves = next(links[name] for name in (kind, "all_gather", "all_reduce") if name in links)
    found: dict[str, Any] = curves[min(curves, key=lambda count: (abs(int(count) - ranks), int(count)))]
    return found


def _between(document: Document, base: Profile, seen: _Observed, network: Network) -> Part:
    """Correct the times of one collective over hosts at one placement; others keep the fabric's model."""
    assert network.fabric is not None
    kind, on = seen.kind, seen.on

    def before(size: float) -> float:
        return seconds_on(on, kind, size, network, base, straggler=False)[0]

    part, correction = seen.corrected(before)
    if correction is not None:
        grid = sorted({*(2.0**power for power in range(10, 33)), *map(float, seen.sizes)})
        of_fabric = document.setdefault("fabrics", {}).setdefault(network.fabric.name, {})
        of_fabric[f"{kind} {on.hosts} {on.per_host}"] = [[size, before(size) * correction.at(size)] for size in grid]
    return part
