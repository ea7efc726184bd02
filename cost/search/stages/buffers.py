"""Bytes of what the ranks of a pipeline receive and send in a pass, beside what their blocks keep.

torch allocates a receive buffer for each micro batch of a pass and each neighbour of a stage, and keeps all of them
across steps. Where ranks hold several stages, it waits for what was sent at the end of a pass only: until then outputs
of stages, and gradients of their inputs, are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from legoai.cost.search.lower_bounds.activations import handed_on
from legoai.cost.search.stages.action_graph import Held
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import pass_micro_batches
from legoai.dsl.analysis.stages.pipeline import stage_count


def sent_and_received(analysis: Analysis, stages: Sequence[int], held: Held, *, between_halves: bool) -> float:
    """Least bytes of a rank, without what is counted with its blocks.

    These are the kept input of a stage's first block, and between the halves of a backward the gradient of the output
    of its last.

    Args:
        analysis: analysis of a plan whose batch and schedule are decided.
        stages: of the rank.
        held: memory state of the rank.
        between_halves: whether blocks keep anything between the halves of a backward.

    Raises:
        Undecided: it depends on a hole.
    """
    each, last = pass_micro_batches(analysis.plan) or 0, (stage_count(analysis) or 0) - 1
    kept = held.kept(between_halves=between_halves)
    received = sum(
        (stage > 0) * (each - kept.get(stage, 0)) + (stage < last) * (each - held.halved.get(stage, 0))
        for stage in stages
    )
    return float(handed_on(analysis) * (max(received, 0) + held.sent))
