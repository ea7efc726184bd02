"""Peak memory of steps whose blocks are treated differently, from simulated steps that treat all blocks equally.

What a block holds until its backward depends on its own treatment, and what its backward needs beside that too. So the
active memory at the turn from forward to backward, and in the backward of a block, is that of a step whose blocks all
have the treatment of that block, but for what the blocks before it hold.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from legoai.cost.search.candidate_bounds.shortfalls import all_but_treatments, as_key, beside_treatments_and_loss
from legoai.cost.search.lower_bounds.memory_bound_kernels import repeated_blocks
from legoai.cost.search.lower_bounds.observed.blocks import (
    keeps_on_device,
    one_treatment,
    text_of,
    treatments_of_blocks,
)
from legoai.cost.search.memory.points import MemoryPoints
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.specs.directives.mesh import DATA_AXES

_LAST: Final = 2
"""Blocks with whose backward the turn of a step may end, which therefore must have one treatment."""


@dataclass(slots=True)
class ObservedPeaks:
    """Memory of the simulated candidates of one plan whose blocks all have one treatment.

    Attributes:
        revision: number of times that something new was observed.
    """

    revision: int = 0
    _seen: dict[str, dict[str, MemoryPoints]] = field(default_factory=dict)
    """By what candidates have in common, and by the treatment of blocks."""
    _most_seen: dict[str | None, dict[str, MemoryPoints]] = field(default_factory=dict)
    """Those of candidates of which most treatments were simulated, by what decides the memory of blocks alone."""

    def observe(self, analysis: Analysis, points: MemoryPoints) -> None:
        """Note the memory of a simulated candidate."""
        key = _decides_memory(analysis) if points.blocks else None
        treatment = None if key is None else one_treatment(analysis)
        known = {} if key is None else self._seen.setdefault(key, {})
        if treatment is not None and treatment not in known:
            known[treatment] = points
            self.revision += 1
            beside = _decides_blocks(analysis)
            if len(known) > len(self._most_seen.get(beside, {})):
                self._most_seen[beside] = known

    def of(self, analysis: Analysis) -> float:
        """Least bytes of active memory of a candidate; 0 where the treatment of some block was not observed.

        Raises:
            Undecided: a treatment is a hole.
        """
        key, treatments = self._key(analysis), treatments_of_blocks(analysis).values()
        if key is None or len(treatments) != len(repeated_blocks(analysis.manifest)):
            return 0.0
        runs = [
            (self._under(analysis, key, text_of(analysis, one)), len(list(same)))
            for one, same in itertools.groupby(treatments)
        ]
        known = [(points, count) for points, count in runs if points is not None]
        return peak_of(known) if len(known) == len(runs) else 0.0

    def uniform(self, analysis: Analysis) -> MemoryPoints | None:
        """Memory of a candidate whose blocks all have one treatment; None where that was not observed."""
        key, treatment = self._key(analysis), one_treatment(analysis)
        return None if key is None or treatment is None else self._under(analysis, key, treatment)

    def _under(self, analysis: Analysis, key: str, treatment: str) -> MemoryPoints | None:
        """Memory under a treatment of all blocks; least, where it was observed beside something else only.

        What is there in the backward of blocks beside them does not depend on their treatment.
        """
        own, others = self._seen[key], self._most_seen.get(_decides_blocks(analysis), {})
        common = next((one for one in own if one in others), None)
        if treatment in own or treatment not in others or common is None:
            return own.get(treatment)
        other, base, seen = others[treatment], others[common], own[common]
        released = other.released + seen.released - base.released
        return replace(other, peak=0.0, released=released, inside=other.inside + seen.inside - base.inside)

    def _key(self, analysis: Analysis) -> str | None:
        """What a candidate has in common with simulated ones; None where there are none."""
        key = _decides_memory(analysis) if self._seen else None
        return key if key in self._seen else None


def peak_of(blocks: Sequence[tuple[MemoryPoints, int]]) -> float:
    """Peak of active memory at the turn of a step, and in the backward of all blocks but the last.

    Args:
        blocks: memory under the treatments of successive blocks, each with the number of these blocks.
    """
    total, found, held = sum(count for _, count in blocks), [0.0], 0.0
    for place, (own, count) in enumerate(blocks):
        until = count - (place == len(blocks) - 1)  # the first backward is not like those of others
        if until:
            found.append(own.inside + held + (until - 1) * own.released - (total - 1) * own.released)
        held += count * own.released
    last, count = blocks[-1]
    if count >= _LAST:
        # The peak may be before all blocks hold what they keep: what the others keep more does not count.
        found.append(last.peak + min(0.0, held - total * last.released))
    return max(found)


@fact
def _decides_memory(analysis: Analysis) -> str | None:
    """What decides memory beside the treatments of equal blocks; None where a compiler may decide it, or copies do."""
    if analysis.plan.compile is not None or analysis.plan.pipeline is not None or not keeps_on_device(analysis):
        return None
    return all_but_treatments(analysis) if repeated_blocks(analysis.manifest) else None


@fact
def _decides_blocks(analysis: Analysis) -> str | None:
    """What decides the memory of blocks: neither the loss, nor how many data-parallel ranks share parameters."""
    body = beside_treatments_and_loss(analysis)
    if body is None:
        return None
    mesh = analysis.plan.mesh
    sizes = {axis: size for axis, size in body.get("mesh", {}).items() if axis not in DATA_AXES}
    return as_key(body | {"mesh": sizes, "data parallel": [mesh.data_parallel, mesh.dp_shard > 1]})
