"""Lower bound of recomputation in blocks whose treatment is open, over all mixtures of the possible treatments.

Within a memory limit the blocks recompute no less than the lower convex hull of seconds over bytes of the treatments
allows. The sides of the hull are outputs of which fractions may be kept
(:func:`legoai.cost.search.lower_bounds.recomputation.least_recomputed`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from legoai.cost.search.lower_bounds.activations import inputs_of_blocks, kept_under
from legoai.cost.search.lower_bounds.local_kernels import Pass
from legoai.cost.search.lower_bounds.memory_bound_kernels import repeated_blocks
from legoai.cost.search.lower_bounds.observed.blocks import ObservedTreatment
from legoai.cost.search.lower_bounds.recomputation import (
    Output,
    by_worth,
    least_kept,
    least_recomputed,
    recomputed_under,
)
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.domains import BUDGETS
from legoai.dsl.frontend.paths import pattern
from legoai.specs.directives.checkpoint import Budget, Every, First, Full, KeepAll, Selective, Stages
from legoai.specs.directives.hole import Hole

_LISTED = (
    KeepAll(),
    Full(),
    Selective(keep=("attention",)),
    Selective(keep=("attention", "matmul")),
    Selective(keep=("attention", "alternate_matmul")),
    *(Budget(amount=amount) for amount in BUDGETS),
)
"""What a rule without a domain is answered by, beside mixtures of these."""


@fact
def open_treatments(analysis: Analysis) -> tuple[Any, ...]:
    """What each block may come to be under, where one open rule is that of all blocks; none where it is not known."""
    checkpoint, manifest = analysis.plan.checkpoint, analysis.manifest
    if checkpoint is None or manifest is None or len(checkpoint.rules) != 1 or len(manifest.block_lists) != 1:
        return ()
    [rule], blocks = checkpoint.rules, list(manifest.block_lists[0].paths)
    hole = rule.treatment
    if not isinstance(hole, Hole) or analysis.module_paths.matching(pattern(rule.path)) != blocks:
        return ()
    found = list(_of_blocks(_LISTED if hole.domain is None else hole.domain))
    if None in found:
        return ()
    # Beside ranks of `cp` budgets are not lowered.
    return tuple(dict.fromkeys(one for one in found if analysis.plan.mesh.cp == 1 or not isinstance(one, Budget)))


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


class Hull(NamedTuple):
    """Seconds that a block takes beyond its own forward and backward, over the bytes that it keeps.

    Attributes:
        sides: what it may keep beyond the least, and the seconds that this saves.
        least: seconds that are left where it keeps the most.
        corners: the treatments between the sides, and at both ends.
    """

    sides: Sequence[Output] = ()
    least: float = 0.0
    corners: Sequence[Any] = ()

    def around(self, room: float) -> Sequence[Any]:
        """The treatments of a mixture of which a block keeps so many bytes beyond the least."""
        ends = list(itertools.accumulate((side.bytes for side in self.sides), initial=0.0))
        place = next((place for place, end in enumerate(ends) if end > room), len(ends))
        return self.corners[max(0, place - 1) : place + 1]


def hull_of_treatments(  # noqa: PLR0917
    analysis: Analysis,
    block: str,
    least: Mapping[str, Pass],
    moved_again: float,
    seen: Callable[[Any], ObservedTreatment | None],
    delay: Callable[[Any, float], float],
    outputs: Sequence[Output],
) -> Hull:
    """What a block may keep beyond the least that some treatment keeps; none where treatments are not open, or known.

    What a block recomputes and how long it is delayed count together.

    Of each treatment it is known what it keeps at least, and what it recomputes at least, but for a budget that was not
    seen; and that it recomputes no less than if fractions of outputs could be kept.

    Args:
        analysis: of a plan whose mesh and micro batch are decided.
        block: its path.
        least: seconds of layers for one micro batch.
        moved_again: seconds of what else a block computes again.
        seen: what a treatment was observed to cost.
        delay: seconds by which a block under a treatment is delayed that recomputes for so many.
        outputs: that backward reads of the block.
    """
    points: list[tuple[Output, Any]] = []
    blocks = repeated_blocks(analysis.manifest)
    given = inputs_of_blocks(analysis) / len(blocks) if blocks else 0.0
    for one in open_treatments(analysis):
        known, kept = seen(one), kept_under(analysis, block, one)
        budget = isinstance(one, Budget)
        again = 0.0 if budget else recomputed_under(analysis, block, one, least, moved_again)
        if kept is None or again is None:
            return Hull()
        if known is not None:
            again, kept = known.recomputed, max(kept, known.kept - given)
        if known is not None or isinstance(one, KeepAll):
            found = [Output(again, max(kept, least_kept(outputs, again)))]
        else:
            found = list(_from(outputs, again, kept))
        points += [(Output(item.seconds + delay(one, item.seconds), item.bytes), one) for item in found]
    return _hull(points)


def _from(outputs: Sequence[Output], again: float, kept: float) -> Iterator[Output]:
    """What may be recomputed and kept where no less than so many seconds and bytes are."""
    last = max(kept, least_kept(outputs, again))
    steps = itertools.accumulate(one.bytes for one in by_worth(outputs))
    for size in (kept, *(size for size in steps if kept < size < last), last):
        yield Output(max(again, least_recomputed(outputs, size)), size)


def _hull(points: Sequence[tuple[Output, Any]]) -> Hull:
    """The lower convex hull of seconds over bytes, from the fewest bytes on, as long as it falls."""
    if not points:
        return Hull()
    at, treatment = min(points, key=lambda point: (point[0].bytes, point[0].seconds))
    sides: list[Output] = []
    corners = [treatment]
    while True:
        steps = [
            (Output(at.seconds - one.seconds, one.bytes - at.bytes), one, treatment)
            for one, treatment in points
            if one.seconds < at.seconds
        ]
        if not steps:
            return Hull(sides, at.seconds, corners)
        side, at, treatment = max(steps, key=lambda step: step[0].seconds / max(step[0].bytes, 1e-9))
        sides.append(side)
        corners.append(treatment)
