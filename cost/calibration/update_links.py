"""Update of a profile's collectives by those that a run measured, on one host and between hosts."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

from legoai.cost.calibration.correction import Typical
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

    The least of equal ones counts on a GPU, as what else ran there could only slow them; the median on a CPU, as
    where a calibration measures them, but for those of which it is not known how long they waited.
    """
    matched: dict[tuple[CollectiveKind, Placement], dict[int, list[float]]] = defaultdict(dict)
    waited: dict[tuple[CollectiveKind, Placement], dict[int, list[float]]] = defaultdict(dict)
    for groups, seen in ((matched, found.seconds), (waited, found.waited)):
        for (kind, on, size), times in seen.items():
            groups[kind, on][size] = times
    parts = []
    for kind, on in sorted({*matched, *waited}, key=str):
        sizes = matched.get((kind, on)) or waited[kind, on]
        if on_device:  # the least counts of both
            sizes = {**waited.get((kind, on), {}), **sizes}
        typical: Typical = min if on_device or (kind, on) not in matched else statistics.median
        if on.hosts == 1:
            parts.append(_inside(document, base, kind, on, sizes, network, typical))
        elif network.fabric is None:
            how = "over several hosts, between which the base has no fabric"
            parts.append(Part(name=_name(kind, on), seen=len(sizes), result="kept", how=how, trial=None))
        else:
            parts.append(_between(document, base, kind, on, sizes, network, typical))
    return parts


def _name(kind: CollectiveKind, on: Placement) -> str:
    if on.hosts == 1:
        return f"links {kind} of {on.ranks}"
    return f"fabric {kind} of {on.hosts} x {on.per_host}"


def _inside(  # noqa: PLR0917
    document: Document,
    base: Profile,
    kind: CollectiveKind,
    on: Placement,
    sizes: dict[int, list[float]],
    network: Network,
    typical: Typical,
) -> Part:
    """Correct the curve of one collective among so many ranks of one host."""
    name = _name(kind, on)

    def before(size: float) -> float:
        return seconds_on(on, kind, size, network, base)[0]

    try:
        before(next(iter(sizes)))
    except ProfileError:
        how = "the base has no collectives to correct"
        return Part(name=name, seen=len(sizes), result="kept", how=how, trial=None)
    part, correction = corrected(name, sorted(sizes.items()), before, float, octaves=0.0, typical=typical)
    if correction is None:
        return part
    near = _nearest(document["links"], kind, on.ranks)
    known = [float(size) for size, _ in near.get("points", ())] or [2.0**power for power in range(10, 31)]
    grid = sorted({*known, *map(float, sizes)})
    limit, steepness, middle = near["sigmoid"]
    document["links"].setdefault(kind, {})[str(on.ranks)] = {
        "sigmoid": [limit / correction.at(grid[-1] * 2**10), steepness, middle],
        "latency": near["latency"] * correction.at(1.0),
        "points": [[size, before(size) * correction.at(size)] for size in grid],
        "derived": "",
    }
    return part


def _nearest(links: Document, kind: CollectiveKind, ranks: int) -> dict[str, Any]:
    """The curve that the base begins from: that of the collective, or of the one that it uses instead."""
    curves = next(links[name] for name in (kind, "all_gather", "all_reduce") if name in links)
    found: dict[str, Any] = curves[min(curves, key=lambda count: (abs(int(count) - ranks), int(count)))]
    return found


def _between(  # noqa: PLR0917
    document: Document,
    base: Profile,
    kind: CollectiveKind,
    on: Placement,
    sizes: dict[int, list[float]],
    network: Network,
    typical: Typical,
) -> Part:
    """Correct the times of one collective over hosts at one placement; other placements stay the fabric's."""
    assert network.fabric is not None

    def before(size: float) -> float:
        return seconds_on(on, kind, size, network, base, straggler=False)[0]

    part, correction = corrected(_name(kind, on), sorted(sizes.items()), before, float, octaves=0.0, typical=typical)
    if correction is not None:
        grid = sorted({*(2.0**power for power in range(10, 33)), *map(float, sizes)})
        of_fabric = document.setdefault("fabrics", {}).setdefault(network.fabric.name, {})
        of_fabric[f"{kind} {on.hosts} {on.per_host}"] = [[size, before(size) * correction.at(size)] for size in grid]
    return part
