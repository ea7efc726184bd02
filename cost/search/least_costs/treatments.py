"""Least recomputation of blocks whose one rule is open, as the treatments that it may come to have allow it.

Each block has one of them, in whatever mixture: with so many bytes of room the blocks recompute no less than on the
lower convex hull of what the treatments keep and recompute. The hull's sides are what may be kept beyond the least, as
outputs of which fractions may be (:func:`legoai.cost.search.least_costs.recomputation.least_recomputed`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from legoai.cost.search.least_costs.activations import kept_under
from legoai.cost.search.least_costs.local_kernels import Pass
from legoai.cost.search.least_costs.recomputation import Output, recomputed_under
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.fact import fact
from legoai.dsl.frontend.paths import pattern
from legoai.specs.directives.checkpoint import Budget, Every, First, Full, KeepAll, Selective, Stages
from legoai.specs.directives.hole import Hole

_LISTED = (
    KeepAll(),
    Full(),
    Selective(keep=("attention",)),
    Selective(keep=("attention", "matmul")),
    Selective(keep=("attention", "alternate_matmul")),
)
"""What a rule without a domain is answered by, beside budgets, and beside mixtures of these."""


@fact
def open_treatments(analysis: Analysis) -> tuple[Any, ...]:
    """What each block may come to be under, where one open rule is that of all blocks; none where it is not known.

    Budgets count as not known, but beside ranks of `cp`, where they are not lowered.
    """
    checkpoint, manifest = analysis.plan.checkpoint, analysis.manifest
    if checkpoint is None or manifest is None or len(checkpoint.rules) != 1 or len(manifest.block_lists) != 1:
        return ()
    [rule], blocks = checkpoint.rules, list(manifest.block_lists[0].paths)
    hole = rule.treatment
    if not isinstance(hole, Hole) or analysis.module_paths.matching(pattern(rule.path)) != blocks:
        return ()
    found = list(_of_blocks(_LISTED if hole.domain is None else hole.domain))
    budgets = hole.domain is None or any(isinstance(one, Budget) for one in found)
    if None in found or (budgets and analysis.plan.mesh.cp == 1):
        return ()
    return tuple(dict.fromkeys(one for one in found if not isinstance(one, Budget)))


def _of_blocks(treatments: Iterable[Any]) -> Iterator[Any]:
    """What single blocks are under; None where that is not known."""
    for one in treatments:
        if isinstance(one, KeepAll | Full | Selective | Budget):
            yield one
        elif isinstance(one, Every):
            yield from (Full(), KeepAll())
        elif isinstance(one, First):
            yield from _of_blocks((one.these, one.others))
        elif isinstance(one, Stages):
            yield from _of_blocks(one.each)
        else:
            yield None


def sides_of_hull(analysis: Analysis, block: str, least: Mapping[str, Pass], moved_again: float) -> list[Output]:
    """What a block may keep beyond the least that some treatment keeps; none where treatments are not open, or known.

    Args:
        analysis: of a plan whose mesh and micro batch are decided.
        block: its path.
        least: seconds of layers for one micro batch.
        moved_again: seconds of what else a block computes again.
    """
    treatments = open_treatments(analysis)
    points = []
    for one in treatments:
        kept, again = kept_under(analysis, block, one), recomputed_under(analysis, block, one, least, moved_again)
        if kept is None or again is None:
            return []
        points.append(Output(again, kept))
    return _sides(points)


def _sides(points: Sequence[Output]) -> list[Output]:
    """The sides of the lower convex hull of seconds over bytes, from the fewest bytes on, as long as it falls."""
    sides = []
    at = min(points, key=lambda one: (one.bytes, one.seconds), default=None)
    while at is not None:
        steps = [
            (Output(at.seconds - one.seconds, one.bytes - at.bytes), one) for one in points if one.seconds < at.seconds
        ]
        best = max(steps, key=lambda step: step[0].seconds / max(step[0].bytes, 1e-9), default=None)
        if best is None:
            break
        sides.append(best[0])
        at = best[1]
    return sides
