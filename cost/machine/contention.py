"""Contention between a kernel and a collective that run at the same time on one device.

A collective occupies multiprocessors, one for each channel, for as long as it runs. A kernel of many independent blocks
slows down by the share of the multiprocessors that is left. Matrix products of Hopper's library differ: they launch as
many persistent blocks as there are multiprocessors, which divide all tiles among them from the start, so that blocks
without a free multiprocessor run after the others. The resulting slowdown was measured, and a profile states it.

A collective reads from memory at least each byte that it sends, and writes each that it receives. Kernels limited by
memory bandwidth are slowed by that.
"""

from __future__ import annotations

import math
import operator

from legoai.cost.kernels.kinds import Consecutive, Movement, Product, Work
from legoai.cost.machine.kernel_time import seconds_of
from legoai.cost.network.algorithms import wire_bytes
from legoai.cost.profiles import Profile
from legoai.cost.timing.timeline import Beside
from legoai.cost.trace.records import Collective

PROCESSORS = "collective_processors"
"""The profile's constant: multiprocessors that a collective occupies, between hosts unless the fabric states it."""
PRODUCTS = "product_slowdown"
"""The profile's constant: time of a matrix product beside a collective, divided by its time alone, if measured."""


def beside_collectives(work: Work, profile: Profile) -> Beside | None:
    """Return the time of a kernel while a collective occupies multiprocessors, divided by its time alone.

    None where the profile does not state how many a collective occupies. Kernels that only move bytes need few of them.
    """
    if PROCESSORS not in profile.constants or not profile.products:
        return None
    if isinstance(work, Movement):
        return Beside(1.0)
    if isinstance(work, Consecutive):
        alone = [seconds_of(part, profile)[0] for part in work.parts]
        parts = [beside_collectives(part, profile) or Beside(1.0) for part in work.parts]
        return Beside(
            *(math.fsum(map(operator.mul, alone, found)) / math.fsum(alone) for found in zip(*parts, strict=True))
        )
    measured = profile.constants.get(PRODUCTS)
    if isinstance(work, Product) and measured is not None:
        return Beside(measured.value)
    return Beside(0.0, 1.0)


def slowdown_by_collective(profile: Profile, channels: int | None) -> float:
    """Return :attr:`Cost.slowdown` of a collective.

    Args:
        profile: of the device.
        channels: that it uses; None for the profile's.
    """
    taken = profile.constants.get(PROCESSORS)
    if taken is None or not profile.products:
        return 1.0
    processors = next(iter(profile.products.values())).curve.processors
    return processors / max(1.0, processors - (taken.value if channels is None else channels))


def memory_share(bytes: float, seconds: float, profile: Profile) -> float:
    """Return the share of the copy bandwidth that a kernel of ``bytes`` bytes in ``seconds`` uses, at most 1."""
    if seconds <= 0:
        return 0.0
    return min(1.0, bytes / seconds / profile.movement["copy"][0].rate)


def memory_of_collective(collective: Collective, seconds: float, profile: Profile) -> float:
    """Return the share of the copy bandwidth that a collective uses: each byte sent is read, each received one written.

    0 where the profile does not state how many multiprocessors a collective occupies.
    """
    if PROCESSORS not in profile.constants or len(collective.ranks) < 2:
        return 0.0
    like = {"receive": "send", "peer_copy": "send", "barrier": "all_reduce"}.get(collective.kind, collective.kind)
    moved = 2 * wire_bytes(like, collective.bytes, len(collective.ranks))  # type: ignore[arg-type]
    return memory_share(moved, seconds, profile)
