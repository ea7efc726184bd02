"""Placement of the ranks of a group, and of the groups beside it, on the hosts of a cluster."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """A group of ``ranks`` on ``hosts`` hosts: at most ``per_host`` of them on one, on another ``short`` fewer.

    The groups of one mesh axis communicate at the same time, so that a group of one rank on each host has one device's
    share of its host's network, and a group of all ranks of its hosts has all of it: ``per_host`` shares. That holds
    also where groups of one axis lie differently on a host: neither takes a share of the other's.
    """

    ranks: int
    hosts: int
    per_host: int
    short: int = 0

    @property
    def fewest(self) -> int:
        """Ranks on the host with fewest of the group: what enters and leaves it has no more adapters' shares."""
        return self.per_host - self.short


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a program: ``size`` of them, equally many in each of the ``stages`` of a pipeline, in order."""

    size: int
    stages: int = 1

    @property
    def of_stage(self) -> int:
        """Ranks of one stage."""
        return self.size // self.stages


def slowest_pair(on: Placement) -> Placement:
    """Return the placement of two neighbours of a ring over a group: on two hosts, if the group is on several."""
    hosts = min(2, on.hosts)
    return Placement(ranks=2, hosts=hosts, per_host=2 // hosts)


def placement(ranks: Sequence[int], devices_per_host: int) -> Placement:
    """Return the placement of global ``ranks``; ranks fill one host's devices before the next host's."""
    counts = Counter(rank // devices_per_host for rank in ranks).values()
    most = max(counts)
    return Placement(ranks=len(ranks), hosts=len(counts), per_host=most, short=most - min(counts))


@functools.lru_cache(maxsize=4096)
def group_placements(ranks: tuple[int, ...], devices_per_host: int, world: World) -> tuple[Placement, ...]:
    """Return the different placements of all groups that run the same collective, first that of ``ranks``.

    Where a group's size does not divide a host's devices, some groups of a mesh axis lie on one host and others do not.
    Groups of other pipeline stages run other collectives, unless a group has ranks in several stages.

    Args:
        ranks: of one group along axes of the mesh, or sender and receiver.
        devices_per_host: of the cluster.
        world: in which the group is.
    """
    first = min(ranks)
    # Hosts are alike, so that groups are placed alike that begin at the same device of theirs.
    shifts = {(start - first) % devices_per_host: start - first for start in _starts(ranks, world)}
    own = placement(ranks, devices_per_host)
    others = (placement([rank + shift for rank in ranks], devices_per_host) for shift in shifts.values())
    return tuple(dict.fromkeys((own, *others)))


@functools.lru_cache(maxsize=1024)
def possible_placements(ranks: tuple[int, ...], devices_per_host: int) -> tuple[Placement, ...]:
    """Return the different placements of a group along axes of a mesh, and of those beside it, in any world."""
    axes = _axes(ranks)
    extent = axes[-1][0] * axes[-1][1] if axes else 1
    return group_placements(ranks, devices_per_host, World(extent * devices_per_host))


def _starts(ranks: Sequence[int], world: World) -> list[int]:
    """The least ranks of a group and of those beside it; only of the group itself where it is along no axes."""
    stage = world.of_stage
    first, last = min(ranks), max(ranks)
    begin = first - first % stage
    if last < begin + stage:
        length = stage
    elif len(ranks) == 2:  # a rank and its like in another stage, if not the next one
        return list(range(begin, begin + stage)) if (last - first) % stage == 0 else [first]
    else:
        begin, length = 0, world.size
    starts, extent = [begin], 1
    for stride, count in _axes(ranks) or [(0, 0)]:
        if not stride or stride % extent:
            return [first]
        starts = [start + place for place in range(0, stride, extent) for start in starts]
        extent = stride * count
    if length % extent:
        return [first]
    starts = [start + place for place in range(0, length, extent) for start in starts]
    return starts if first in starts else [first]


def _axes(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Stride and size of the axes along which a group's ranks lie, innermost first; empty where they lie otherwise."""
    first = min(ranks)
    offsets = [rank - first for rank in sorted(ranks)]
    axes: list[tuple[int, int]] = []
    known = 1
    while known < len(offsets):
        stride, count = offsets[known], 1
        while offsets[known * count : known * (count + 1)] == [count * stride + one for one in offsets[:known]]:
            count += 1
        if count == 1 or len(offsets) % (known * count):
            return []
        axes.append((stride, count))
        known *= count
    return axes
