"""Placement of the ranks of a group on the hosts of a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """A group of ``ranks`` on ``hosts`` hosts, at most ``per_host`` of them on one, and at least ``short`` fewer.

    The groups of one mesh axis communicate at the same time, so that a group of one rank on each host has one device's
    share of its host's network, and a group of all ranks of its hosts has all of it: ``per_host`` shares.
    """

    ranks: int
    hosts: int
    per_host: int
    short: int = 0

    @property
    def fewest(self) -> int:
        """Ranks on the host that has fewest of the group: as many adapters as all that enters that host shares."""
        return self.per_host - self.short


def slowest_pair(on: Placement) -> Placement:
    """Return the placement of two neighbours of a ring over a group: on two hosts, if the group is on several."""
    hosts = min(2, on.hosts)
    return Placement(ranks=2, hosts=hosts, per_host=2 // hosts)


def placement(ranks: Sequence[int], devices_per_host: int) -> Placement:
    """Return the placement of global ``ranks``; ranks fill one host's devices before the next host's."""
    counts = Counter(rank // devices_per_host for rank in ranks).values()
    most = max(counts)
    return Placement(ranks=len(ranks), hosts=len(counts), per_host=most, short=most - min(counts))
