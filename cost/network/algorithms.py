r"""Algorithms of collectives: bytes over each link, and hops.

In every formula S is the *whole* buffer, as `Collective.bytes` has it: the gathered output of an all-gather, the input
of a reduce-scatter, the buffer of an all-reduce, a broadcast or a transfer, and of an all-to-all the local input. P
ranks lie on N hosts, at most r on one and at least q, where these are equal `r = q = P/N`; each device has its own link
inside the host and its share of an adapter out of it. Table 4.5 of the dissertation calls S "per processor", charges
`(P-N-1)/(P-N)` of it, and adds the times of links that work at the same time. Derived anew:

- **Ring** (or chain): a ring visits all ranks of one host before the next. In an all-gather each rank must receive
  what it lacks, `(P-1)/P · S`, and in a ring each passes on what it receives: that is what each link inside the host
  carries. NCCL lays one ring for each adapter. All of them cross into and out of every host, also the one with fewest
  ranks, whose q adapters carry `(P-1)/P · S / q` each. A reduce-scatter is the same in reverse, an all-reduce is both.
  Of the `P-1` steps of each, `N-1` wait for the network when the pieces are small.
- **Tree**: reduce and broadcast along two binary trees, of which each has one half of S. Seen as a reduce-scatter
  inside the host, an exchange between hosts, and an all-gather, each link carries `2(r-1)/r · S`, and each adapter,
  with `S/q` to reduce over N hosts, the optimum of `2(N-1)/N · S / q`: for two hosts about half of what a ring sends.
  `2⌈log₂ N⌉` hops wait for the network.
- **All-to-all**: each rank sends S/P to each other: `(r-1)/P · S` over the link of one of r on a host, `(P-q)/P · S`
  over the adapter of one of q.
- **Broadcast**: a chain: S over each link, S/q over each adapter of the host with fewest, in N-1 hops; pipelined.
- **Send and receive**: S over the one link or adapter.
- **Permute**: every rank sends S to the next of a ring: S over each link, and over the adapter of a rank whose next is
  on another host. It takes as long as the slowest of these transfers.

Links inside and outside are used at the same time, pipelined, so that the slower decides: the time is the maximum,
not the sum as in eq. 4.7 to 4.10. The library picks the faster algorithm, as NCCL's own tuning does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from legoai.cost.network.topology import Placement
from legoai.cost.trace.records import CollectiveKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Traffic of one algorithm: bytes over each link of a host, bytes over each device's adapter, and hops between."""

    algorithm: str
    link_bytes: float
    adapter_bytes: float
    hops: int


def _ring(passes: int) -> Callable[[float, Placement], Traffic]:
    def traffic(size: float, on: Placement) -> Traffic:
        carried = passes * (on.ranks - 1) / on.ranks * size
        adapter = carried / on.fewest if on.hosts > 1 else 0.0
        link = carried if on.per_host > 1 else 0.0
        return Traffic(algorithm="ring", link_bytes=link, adapter_bytes=adapter, hops=passes * (on.hosts - 1))

    return traffic


def _tree(size: float, on: Placement) -> Traffic:
    per_host, hosts = on.per_host, on.hosts
    return Traffic(
        algorithm="tree",
        link_bytes=2 * (per_host - 1) / per_host * size,
        adapter_bytes=2 * (hosts - 1) / hosts * size / on.fewest,
        hops=2 * math.ceil(math.log2(hosts)),
    )


def _all_to_all(size: float, on: Placement) -> Traffic:
    return Traffic(
        algorithm="pairs",
        link_bytes=(on.per_host - 1) / on.ranks * size,
        adapter_bytes=(on.ranks - on.fewest) / on.ranks * size,
        hops=min(1, on.hosts - 1),
    )


def _broadcast(size: float, on: Placement) -> Traffic:
    return Traffic(
        algorithm="chain",
        link_bytes=size if on.per_host > 1 else 0.0,
        adapter_bytes=size / on.fewest if on.hosts > 1 else 0.0,
        hops=on.hosts - 1,
    )


def _transfer(size: float, on: Placement) -> Traffic:
    inside = on.hosts == 1
    return Traffic(
        algorithm="transfer",
        link_bytes=size if inside else 0.0,
        adapter_bytes=0.0 if inside else size,
        hops=on.hosts - 1,
    )


ALGORITHMS: Final[Mapping[CollectiveKind, tuple[Callable[[float, Placement], Traffic], ...]]] = {
    "all_gather": (_ring(1),),
    "reduce_scatter": (_ring(1),),
    "all_reduce": (_ring(2), _tree),
    "all_to_all": (_all_to_all,),
    "permute": (_transfer,),
    "broadcast": (_broadcast,),
    "send": (_transfer,),
    "receive": (_transfer,),
    "peer_copy": (_transfer,),
    "barrier": (_tree,),
}
"""The algorithms that a library may choose from, by collective."""


def traffic(kind: CollectiveKind, size: float, on: Placement) -> tuple[Traffic, ...]:
    """Return the traffic of each algorithm of ``kind`` for a buffer of ``size`` bytes."""
    return tuple(algorithm(size, on) for algorithm in ALGORITHMS[kind])


def wire_bytes(kind: CollectiveKind, size: float, ranks: int) -> float:
    """Return bytes over each link of one host for the first algorithm, against which bandwidths are fitted."""
    return ALGORITHMS[kind][0](size, Placement(ranks=ranks, hosts=1, per_host=ranks)).link_bytes
