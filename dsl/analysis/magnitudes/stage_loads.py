"""Work of the stages and ranks of a pipeline, in blocks of the model."""

from __future__ import annotations

import math
from collections.abc import Sequence

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.magnitudes.flops import DECODERS, forward_flops_of_modules
from legoai.dsl.analysis.stages.pipeline import split_points, stages_of_ranks


@fact
def loads_of_starts(analysis: Analysis) -> dict[str, float]:
    """Return the work of each module with which a stage can begin, in mean blocks.

    It is in proportion to the operations of forward, where they are known; else blocks are worth one, and the modules
    beside them nothing.
    """
    plan, known = analysis.plan, split_points(analysis)
    blocks = set(known.blocks)
    if plan.model.family not in DECODERS or plan.batch.seq_len is None or not blocks:
        return {start: float(start in blocks) for start in known.starts}
    assert analysis.manifest is not None
    found = dict.fromkeys(known.starts, 0.0)
    for path, flops in forward_flops_of_modules(analysis.manifest, plan.batch.seq_len).items():
        start = known.holder(path)
        if start is not None:
            found[start] += flops
    mean = sum(found[block] for block in blocks) / len(blocks)
    return {start: flops / mean for start, flops in found.items()}


def loads_of_ranks(analysis: Analysis, points: Sequence[str]) -> list[float]:
    """Return the work of each rank of `pp`, in mean blocks.

    Args:
        analysis: of a plan with a pipeline.
        points: the first module of each stage but the first.
    """
    loads = loads_of_starts(analysis)
    of_stages = [sum(map(loads.__getitem__, stage)) for stage in split_points(analysis).stages(points, len(points) + 1)]
    return [sum(of_stages[stage] for stage in stages) for stages in stages_of_ranks(analysis)]


def most_even(analysis: Analysis, stages: int) -> tuple[str, float]:
    """Return the form of `even` under which the rank with the most work has least, and that work, in mean blocks."""
    known, loads = split_points(analysis), loads_of_starts(analysis)
    found = {
        f"even(loss = {weight})" if weight else "even": max(
            loads_of_ranks(analysis, known.even(stages, loss=float(weight)))
        )
        for weight in range(math.ceil(loads[known.starts[-1]]) + 1)
    }
    return min(found.items(), key=lambda item: item[1])
