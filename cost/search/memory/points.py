"""Observed memory of repeated blocks at the points of a step, from which other treatments of them are predicted.

The backward of a block frees its activations; its unsharded parameters may remain. Both sizes are the same for all
repeated blocks, so a line through a few of them gives the active memory in the backward of any of them. Only that of
the last block, the first in backward, is lower: the parameters and gradients of others are not there yet. Blocks of
several lists are counted through all of them, and the line gives their mean.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from legoai.cost.memory.following import Followed
from legoai.cost.trace.marks import MICRO_BATCH
from legoai.cost.trace.records import Kernel, Mark, Phase
from legoai.cost.trace.segments import Instance, Segment
from legoai.dsl.analysis.facts import of_innermost
from legoai.specs.models.manifests.manifest import Manifest

if TYPE_CHECKING:
    from legoai.cost.estimate import Estimate, RankEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoints:
    """Active memory in the last micro batch of a step whose blocks all have one treatment, in bytes.

    Attributes:
        blocks: number of blocks; 0 where they cannot be distinguished, so that peak, released and inside are unknown.
        peak: peak from forward to the start of backward: in forward, in the loss, and in the last blocks' backward.
        released: decrease of active memory by the backward of one block, other than the last.
        inside: peak in the backward of the last block, extrapolated from the other blocks.
        optimizer: peak while the optimizer runs.
        outside: bytes of the device used outside PyTorch's allocator.
    """

    blocks: int = 0
    peak: float = 0.0
    released: float = 0.0
    inside: float = 0.0
    optimizer: float = 0.0
    outside: float = 0.0


_SHIFTED: Final = 2
"""Blocks in a segment of backward that begins and ends within a block."""


class _BlockBackward(NamedTuple):
    """Backward of one block: its index, and active bytes before it and at its peak."""

    block: int
    before: int
    most: int


def memory_points(found: Estimate, manifest: Manifest) -> MemoryPoints:
    """The points of a simulated step of one rank.

    They are zero for a pipeline; without distinguishable blocks only `optimizer` and `outside` are known.
    """
    [rank, *others] = found.ranks
    blocks = [path for item in manifest.block_lists if item.path for path in item.paths]
    if others or not blocks:
        return MemoryPoints()
    seen = _follow(rank, {path: place for place, path in enumerate(blocks)})
    optimizer, outside = rank.memory.by_phase.get("optimizer", 0), rank.use.total - rank.use.reserved
    are_in_order = all(one.block > other.block for one, other in itertools.pairwise(seen.backward))
    if len(seen.backward) < 2 or not are_in_order:  # lists may stand otherwise than forward takes them
        return MemoryPoints(optimizer=optimizer, outside=outside)
    steady = seen.backward[1:] if len(seen.backward) > 2 else seen.backward
    first, last = steady[0], steady[-1]
    released = (first.before - last.before) / (first.block - last.block)
    return MemoryPoints(
        blocks=len(blocks),
        peak=seen.peak,
        released=released,
        inside=max(one.most + (len(blocks) - 1 - one.block) * released for one in steady),
        optimizer=optimizer,
        outside=outside,
    )


@dataclass(slots=True)
class _LastMicroBatch:
    backward: list[_BlockBackward] = field(default_factory=list)
    peak: int = 0


def _follow(rank: RankEstimate, places: dict[str, int]) -> _LastMicroBatch:
    """Active memory before and in the backward of blocks, in the last micro batch; their places are given by path."""
    kinds: dict[int, tuple[Segment, frozenset[Phase], frozenset[str]]] = {}
    seen = _LastMicroBatch()
    for before, most, item in _segments_of_last_micro_batch(rank):
        if id(item.segment) not in kinds:
            kernels = [one for one in item.segment.records if isinstance(one, Kernel)]
            modules = frozenset(one.module for one in kernels if one.module)
            kinds[id(item.segment)] = item.segment, frozenset(one.phase for one in kernels), modules
        _, phases, modules = kinds[id(item.segment)]
        if "backward" in phases and "optimizer" not in phases:
            found = {of_innermost(item.path(module), places) for module in modules}
            known = {place for place in found if place is not None}
            if len(known) == len(found) in (1, _SHIFTED):
                seen.backward.append(_BlockBackward(max(known), before, most))
        if not seen.backward:
            seen.peak = max(seen.peak, most)
    return seen


def _segments_of_last_micro_batch(rank: RankEstimate) -> list[tuple[int, int, Instance]]:
    """Segment instances from the last micro batch on, each with the active bytes before it and at its peak."""
    found: list[tuple[int, int, Instance]] = []
    for one in rank.trace.summary(Followed).seen:
        if not rank.span.start <= one.start < rank.span.stop:
            continue
        if isinstance(one.item, Mark) and one.item.name.startswith(MICRO_BATCH):
            found.clear()
        elif one.effect is not None and isinstance(one.item, Instance):
            found.append((one.before, one.before + one.effect.most, one.item))
    return found
