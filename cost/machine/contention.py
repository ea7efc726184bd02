"""Contention between a kernel and a collective that run at the same time on one device.

A collective occupies multiprocessors, one for each channel, for as long as it runs. A kernel of many independent blocks
is then slower by the share of the multiprocessors that is left. Matrix products of Hopper's library are not of that
kind: as many blocks as there are multiprocessors divide all tiles among them from the start, so that those that find
no place run after the others. How much that takes was measured, and a profile states it.

A collective reads from memory each byte that it sends and writes each that it receives, at least. What only moves bytes
is slowed by that.
"""

from __future__ import annotations

from legoai.cost.kernels.work import Movement, Product, Work
from legoai.cost.network.algorithms import wire_bytes
from legoai.cost.profiles import Profile
from legoai.cost.trace.records import Collective

PROCESSORS = "collective_processors"
"""The profile's constant: multiprocessors that a collective occupies."""
PRODUCTS = "product_slowdown"
"""The profile's constant: the time of a product beside a collective over its time alone, where that was measured."""


def beside_collectives(work: Work, profile: Profile) -> float | None:
    """The time of a kernel while a collective occupies multiprocessors, over its time alone.

    None where the profile does not state how many a collective occupies. What moves bytes needs but a few.
    """
    taken = profile.constants.get(PROCESSORS)
    if taken is None or not profile.products:
        return None
    if isinstance(work, Movement):
        return 1.0
    measured = profile.constants.get(PRODUCTS)
    if isinstance(work, Product) and measured is not None:
        return measured.value
    processors = next(iter(profile.products.values())).curve.processors
    return processors / max(1.0, processors - taken.value)


def memory_share(bytes: float, seconds: float, profile: Profile) -> float:
    """The share that a kernel of ``bytes`` bytes in ``seconds`` has of the rate at which copies run, at most 1."""
    if seconds <= 0:
        return 0.0
    return min(1.0, bytes / seconds / profile.movement["copy"][0].rate)


def memory_of_collective(collective: Collective, seconds: float, profile: Profile) -> float:
    """The share that a collective has of the rate at which copies run: each byte sent is read, each received written.

    0 where the profile does not state how many multiprocessors a collective occupies.
    """
    if PROCESSORS not in profile.constants or len(collective.ranks) < 2:
        return 0.0
    like = {"receive": "send", "peer_copy": "send", "barrier": "all_reduce"}.get(collective.kind, collective.kind)
    moved = 2 * wire_bytes(like, collective.bytes, len(collective.ranks))  # type: ignore[arg-type]
    return memory_share(moved, seconds, profile)
