"""Time of a collective on a cluster: the first of a chain of models that has an answer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from legoai.cost.measurements.interpolation import Measured
from legoai.cost.network.algorithms import wire_bytes
from legoai.cost.network.bandwidth import LinkCurve
from legoai.cost.network.fabric import FabricModel, analytical, fabric_model
from legoai.cost.network.statistics import below_measured
from legoai.cost.network.topology import Placement, World, group_placements, placement, slowest_pair
from legoai.cost.profiles import Profile
from legoai.cost.trace.records import Collective, CollectiveKind
from legoai.specs.cluster import Cluster
from legoai.specs.profile_file import ProfileError

MEASURED: Final = "measured table"
ANALYTICAL: Final = "analytical"
STATISTICAL: Final = "statistical"

_LIKE: Final[Mapping[CollectiveKind, CollectiveKind]] = {
    "receive": "send",
    "permute": "send",
    "peer_copy": "send",
    "barrier": "all_reduce",
}
_MIRRORED: Final[Mapping[CollectiveKind, CollectiveKind]] = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
}
"""A ring's reduce-scatter moves the same bytes as its all-gather, in the other direction."""
LINKS_OF_OTHERS: Final[tuple[CollectiveKind, ...]] = ("all_gather", "all_reduce")
"""Collectives whose curves on one host stand for those of one that was not measured, such as a broadcast."""
_BARRIER_BYTES: Final = 4

Answer: TypeAlias = tuple[float, str]
"""Seconds, and the name of the model that gave them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Network:
    """A cluster's links and fabric.

    ``bandwidth`` is one device's share of its adapter, in bytes per second; 0 for a single host. ``answers`` holds
    estimates that were computed, for speed.
    """

    devices_per_host: int
    bandwidth: float
    fabric: FabricModel | None
    answers: dict[tuple[object, ...], Answer] = field(default_factory=dict)


def network_of(cluster: Cluster, *, profile: Profile | None = None) -> Network:
    """Return the network of ``cluster``, with its fabric as shipped, and a profile's observations.

    Raises:
        ProfileError: there is no model of the fabric.
        CatalogueError: the catalogue has no bandwidth for the fabric.
    """
    if cluster.hosts == 1:
        return Network(devices_per_host=cluster.devices_per_host, bandwidth=0.0, fabric=None)
    assert cluster.fabric is not None
    model = fabric_model(cluster.fabric.name)
    if profile is not None and model.name in profile.fabrics:
        model = replace(model, observed=profile.fabrics[model.name])
    return Network(
        devices_per_host=cluster.devices_per_host,
        bandwidth=cluster.fabric.figure("bandwidth_bytes_per_second"),
        fabric=model,
    )


def estimate(
    collective: Collective,
    network: Network,
    profile: Profile,
    *,
    world: World | None = None,
    straggler: bool = True,
) -> Answer:
    """Return the seconds that ``collective`` takes once all its ranks have arrived, and the model that estimated them.

    In a ``world``, these are of the slowest of all groups that run the same collective: sooner or later the ranks of
    the others wait for it.

    The first model that applies is used: `measured table` for a placement that was measured, `statistical` where a
    regression was fitted for the fabric, `analytical`. A model of another device or fabric is marked as derived:
    `analytical, derived`.

    With ``straggler``, time is the 75th percentile of runs where their spread was measured, otherwise the minimum.

    Raises:
        ProfileError: the profile has no measurement of any collective on the device's own links.
    """
    on = slowest_placement(collective, network, profile, world)
    key = (collective.kind, collective.bytes, on, profile.hash, straggler)
    known = network.answers.get(key)
    if known is None:
        known = seconds_on(on, collective.kind, collective.bytes, network, profile, straggler=straggler)
        network.answers[key] = known
    return known


def slowest_placement(collective: Collective, network: Network, profile: Profile, world: World | None) -> Placement:
    """Return the placement of the slowest of the groups that run a collective; of its own group, without a world.

    Also of a copy from a peer: its two ends are no group, so that those beside it cannot be found from them, and all of
    a group that shares symmetric memory are on one host.

    Raises:
        ProfileError: the profile has no measurement of any collective on the device's own links.
    """
    if world is None or collective.kind == "peer_copy":
        return placement(collective.ranks, network.devices_per_host)
    places = group_placements(collective.ranks, network.devices_per_host, world)
    return slowest(places, collective.kind, collective.bytes, network, profile)


def slowest(
    places: Sequence[Placement], kind: CollectiveKind, bytes: float, network: Network, profile: Profile
) -> Placement:
    """Return that of ``places`` on which a collective of ``bytes`` takes longest, the first of equal ones.

    Raises:
        ProfileError: the profile has no measurement of any collective on the device's own links.
    """
    if len(places) == 1:
        return places[0]
    return max(places, key=lambda on: seconds_on(on, kind, bytes, network, profile)[0])


def seconds_on(
    on: Placement, kind: CollectiveKind, bytes: float, network: Network, profile: Profile, *, straggler: bool = True
) -> Answer:
    """As :func:`estimate`, for a group with a placement ``on`` the hosts."""
    size = float(_BARRIER_BYTES if kind == "barrier" else bytes)
    like = _LIKE.get(kind, kind)
    on = slowest_pair(on) if kind == "permute" and on.ranks > 1 else on
    if on.ranks == 1 or size == 0:
        return 0.0, ANALYTICAL
    if on.hosts == 1:
        return _inside(like, size, on.per_host, profile)
    assert network.fabric is not None, "a group over hosts on a cluster of one"
    seen = _of_placement(network.fabric.observed, like, on)
    observed = seen.at(size) if seen is not None else None
    seconds, model = _between(like, size, on, network, profile) if observed is None else (observed, MEASURED)
    if model != MEASURED:
        seconds = max(seconds, _of_one_host(like, size, on.ranks, network, profile))
    if straggler and network.fabric.straggler is not None:
        seconds *= network.fabric.straggler.ratio(on.ranks, size)
    return seconds, model + (", derived" if network.fabric.derived and observed is None else "")


def _inside(kind: CollectiveKind, size: float, ranks: int, profile: Profile) -> Answer:
    """On one host: interpolated between the measured numbers of ranks, by the bytes over a link."""
    like, curves = _curves(kind, profile)
    if like != kind:  # as long as what carries as many bytes over each link
        size *= wire_bytes(kind, size, ranks) / wire_bytes(like, size, ranks)
        kind = like
    below = max((count for count in curves if count <= ranks), default=min(curves))
    above = min((count for count in curves if count >= ranks), default=max(curves))
    if below == above:
        return _on_link(kind, size, ranks, below, curves[below])
    moved = [wire_bytes(kind, size, count) for count in (below, ranks, above)]
    share = (moved[1] - moved[0]) / (moved[2] - moved[0])
    (first, model), (second, _) = (_on_link(kind, size, count, count, curves[count]) for count in (below, above))
    return first + share * (second - first), model


def _on_link(kind: CollectiveKind, size: float, ranks: int, measured: int, curve: LinkCurve) -> Answer:
    """From the curve for ``measured`` ranks; for other numbers of ``ranks``, scaled by their bytes and hops."""
    suffix = ", derived" if curve.derived else ""

    def formula(bytes: float) -> tuple[float, float]:
        return curve.latency + wire_bytes(kind, bytes, measured) / curve.sigmoid.at(bytes), curve.latency

    exact = _of_table(curve.measured, size, formula)
    if exact is not None:
        scale = wire_bytes(kind, size, ranks) / wire_bytes(kind, size, measured)
        extra = curve.latency * max(0.0, (ranks - measured) / measured)
        return exact * scale + extra, MEASURED + suffix
    latency = curve.latency * max(1.0, ranks / measured)
    return latency + wire_bytes(kind, size, ranks) / curve.sigmoid.at(size), ANALYTICAL + suffix


def _between(kind: CollectiveKind, size: float, on: Placement, network: Network, profile: Profile) -> Answer:
    """Over hosts: the best algorithm, limited by its slower link."""
    fabric = network.fabric
    assert fabric is not None
    table = _of_placement(fabric.measured, kind, on)
    formula = functools.partial(_formula, kind, on=on, network=network, profile=profile)
    seconds, latency = formula(size)
    regression = fabric.regression.get(kind)
    if regression is not None and regression.of_one_size:
        known = table or _of_placement(fabric.measured, _MIRRORED.get(kind, kind), on)
        measured = known.at(regression.bytes[0]) if known is not None else None
        there = formula(regression.bytes[0])
        found = regression.near_one_size((seconds, latency), there, on.ranks, measured)
        return found, STATISTICAL if measured is None else MEASURED
    exact = _of_table(table, size, formula)
    if exact is not None:
        return exact, MEASURED
    if regression is None:
        return max(seconds, _of_fewer_hosts(kind, size, on, network, profile)), ANALYTICAL
    first = regression.bytes[0]
    if size < first:
        return regression.below((seconds, latency), formula(first), on.ranks), STATISTICAL
    return regression.seconds(seconds, latency, on.ranks, size), STATISTICAL


def _of_one_host(kind: CollectiveKind, size: float, ranks: int, network: Network, profile: Profile) -> float:
    """Seconds of a group of one host, which over hosts takes no less; 0 where no such group was measured."""
    inside = min(ranks, network.devices_per_host)
    if inside == 1 or not profile.links:
        return 0.0
    seconds, model = _inside(kind, size, inside, profile)
    return seconds if model == MEASURED else 0.0


def _of_fewer_hosts(kind: CollectiveKind, size: float, on: Placement, network: Network, profile: Profile) -> float:
    """Most seconds of measured groups over fewer hosts with as many ranks on each; 0 where there is none."""
    fabric, most = network.fabric, 0.0
    assert fabric is not None
    for hosts in range(2, 0 if on.short else on.hosts):
        fewer = Placement(ranks=hosts * on.per_host, hosts=hosts, per_host=on.per_host)
        formula = functools.partial(_formula, kind, on=fewer, network=network, profile=profile)
        most = max(most, _of_table(_of_placement(fabric.measured, kind, fewer), size, formula) or 0.0)
    return most


def _formula(
    kind: CollectiveKind, size: float, on: Placement, network: Network, profile: Profile
) -> tuple[float, float]:
    """Analytical seconds of a group over hosts, and the latency among them."""
    assert network.fabric is not None
    link = _link_seconds(kind, size, on.per_host, profile)
    return analytical(kind, size, on, network.fabric, bandwidth=network.bandwidth, link=link)


def _of_table(table: Measured | None, size: float, formula: Callable[[float], tuple[float, float]]) -> float | None:
    """Seconds by measured sizes; None where there is no table, or none of its sizes is near enough.

    Args:
        table: of a group.
        size: bytes.
        formula: analytical seconds of a message of so many bytes, and its latency.
    """
    exact = None if table is None else table.at(size, lambda bytes: formula(bytes)[0])
    if table is None or exact is None or size >= table.sizes[0]:
        return exact
    return below_measured(formula(size), formula(table.sizes[0]), exact)


def _of_placement(tables: Mapping[tuple[str, int, int], Measured], kind: str, on: Placement) -> Measured | None:
    """The table of a placement; none where hosts have different numbers of ranks, which no table is of."""
    return None if on.short else tables.get((kind, on.hosts, on.per_host))


def _link_seconds(kind: CollectiveKind, size: float, ranks: int, profile: Profile) -> float:
    """Seconds per byte over one device's link, for a message of ``size`` bytes."""
    if ranks == 1:
        return 0.0
    _, curves = _curves(kind, profile)
    nearest = min(curves, key=lambda count: abs(math.log(count / ranks)))
    return 1 / curves[nearest].sigmoid.at(size)


def _curves(kind: CollectiveKind, profile: Profile) -> tuple[CollectiveKind, Mapping[int, LinkCurve]]:
    """Curves by number of ranks, and of what."""
    for name in (kind, *LINKS_OF_OTHERS):
        if name in profile.links:
            return name, profile.links[name]
    raise ProfileError(f"the profile of {profile.name} has no measurement of collectives on one host")
