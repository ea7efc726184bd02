"""Update of a profile's collectives by the measurements of a run, on one host and between hosts."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

from legoai.cost.calibration.correction import Correction, Typical
from legoai.cost.calibration.observed.collectives import CollectiveTimes
from legoai.cost.calibration.update import Document, Part, corrected
from legoai.cost.machine.collective_time import LINKS_OF_OTHERS, Network, seconds_on
from legoai.cost.network.algorithms import wire_bytes
from legoai.cost.network.topology import Placement
from legoai.cost.profiles import Profile
from legoai.cost.trace.records import CollectiveKind

_Groups: TypeAlias = defaultdict[tuple[CollectiveKind, Placement, str], dict[int, list[float]]]
"""Seconds by size, of each collective at a placement and on a fabric."""

_LINKS: Final = Network(devices_per_host=0, bandwidth=0.0, fabric=None)
"""The network of a collective on one host, which uses none."""


def update_links(
    document: Document, base: Profile, found: Sequence[tuple[CollectiveTimes, Network]], *, on_device: bool
) -> list[Part]:
    """Update collectives in place; each fabric by the runs on it, and the links inside a host by all.

    Of equal collectives the minimum is used on a GPU, as other work there could only slow them down; on a CPU it is the
    median, as in a calibration, except for collectives whose waiting time is not known.
    """
    matched, waited = _Groups(lambda: defaultdict(list)), _Groups(lambda: defaultdict(list))
    networks: dict[str, Network] = {}
    for of_run, network in found:
        fabric = "" if network.fabric is None else network.fabric.name
        networks[fabric] = network
        for groups, seen in ((matched, of_run.seconds), (waited, of_run.waited)):
            for (kind, on, size), times in seen.items():
                groups[kind, on, fabric if on.hosts > 1 else ""][size].extend(times)
    parts, links = [], {kind: dict(curves) for kind, curves in document["links"].items()}
    for key in sorted({*matched, *waited}, key=str):
        kind, on, fabric = key
        sizes = matched.get(key) or waited[key]
        if on_device:  # the minimum covers both
            sizes = {**waited.get(key, {}), **sizes}
        typical: Typical = min if on_device or key not in matched else statistics.median
        one = _Observed(kind, on, fabric, sizes, typical)
        if on.hosts == 1:
            parts.append(_inside(document, links, base, one))
        elif on.short:
            parts.append(one.kept("over hosts with different numbers of its ranks, for which there are no tables"))
        elif not fabric:
            parts.append(one.kept("over several hosts, whose fabric the run does not state, or no model is of"))
        else:
            parts.append(_between(document, base, one, networks[fabric]))
    return parts


class _Observed(NamedTuple):
    """Measurements of one collective at one placement: its seconds by size, and the statistic of equal ones.

    ``fabric`` is the name of the one between the hosts; empty for one host, or where it is not known.
    """

    kind: CollectiveKind
    on: Placement
    fabric: str
    sizes: dict[int, list[float]]
    typical: Typical

    @property
    def name(self) -> str:
        if self.on.hosts == 1:
            return f"links {self.kind} of {self.on.ranks}"
        on_each = f"{self.on.fewest} to {self.on.per_host}" if self.on.short else str(self.on.per_host)
        return " ".join(filter(None, ["fabric", self.fabric, self.kind, f"of {self.on.hosts} x {on_each}"]))

    def kept(self, how: str) -> Part:
        """Return the part with the base's figures."""
        return Part(name=self.name, seen=len(self.sizes), result="kept", how=how, trial=None)

    def corrected(self, before: Callable[[float], float]) -> tuple[Part, Correction | None]:
        """Return the part, and the correction of the base's times by size."""
        measured = sorted(self.sizes.items())
        return corrected(self.name, measured, before, float, octaves=0.0, typical=self.typical)


class _Known(NamedTuple):
    """The base's times of a collective on one host, which rest on the ``curves`` of one that is ``like`` it.

    Attributes:
        base: the profile.
        kind: the collective.
        like: itself, or another one where the base has not measured it.
        curves: of ``like``, by number of ranks.
    """

    base: Profile
    kind: CollectiveKind
    like: CollectiveKind
    curves: Document

    def seconds(self, size: float, ranks: int) -> float:
        """Seconds of the collective."""
        return seconds_on(Placement(ranks, 1, ranks), self.kind, size, _LINKS, self.base)[0]

    def curve(self, ranks: int, sizes: Iterable[float] = ()) -> Document:
        """Return a curve of the collective for a number of ranks, with points at further ``sizes``."""
        found = self.curves[min(self.curves, key=lambda count: (abs(int(count) - ranks), int(count)))]
        limit, steepness, middle = found["sigmoid"]
        # The other collective takes as long for a size that is so much larger, with as many bytes over each link.
        scale = wire_bytes(self.kind, 1.0, ranks) / wire_bytes(self.like, 1.0, ranks)
        points = found.get("points") or [[2.0**power, 0.0] for power in range(10, 31)]
        grid = sorted({*(size / scale for size, _ in points), *sizes})
        return {
            "sigmoid": [limit, steepness, middle - math.log(scale)],
            "latency": found["latency"],
            "points": [[size, self.seconds(size, ranks)] for size in grid],
            "derived": found.get("derived", ""),
        }


def _inside(document: Document, links: Document, base: Profile, seen: _Observed) -> Part:
    """Correct the curve of one collective for a number of ranks of one host; ``links`` are the base's."""
    kind, ranks = seen.kind, seen.on.ranks
    like = next((name for name in (kind, *LINKS_OF_OTHERS) if name in links), None)
    if like is None:
        return seen.kept("the base has no collectives to correct")
    known = _Known(base, kind, like, links[like])
    part, correction = seen.corrected(lambda size: known.seconds(size, ranks))
    if correction is not None:
        own = document["links"].get(kind)
        if own is None:  # else other numbers of ranks would follow from this one
            own = document["links"][kind] = {count: known.curve(int(count)) for count in known.curves}
        own[str(ranks)] = _corrected(known.curve(ranks, map(float, seen.sizes)), correction)
    return part


def _corrected(curve: Document, correction: Correction) -> Document:
    """Return a measured curve, with the times of the base's corrected by size."""
    limit, steepness, middle = curve["sigmoid"]
    points = curve["points"]
    return {
        "sigmoid": [limit / correction.at(points[-1][0] * 2**10), steepness, middle],
        "latency": curve["latency"] * correction.at(1.0),
        "points": [[size, seconds * correction.at(size)] for size, seconds in points],
        "derived": "",
    }


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
