"""Compute actions of a pipeline rank's schedule, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from torch.distributed.pipelining.schedules import PipelineScheduleSingle, Schedule1F1B

from legoai.cost.pipelines.action_classes import Action

_COMPUTES: Final = ("F", "B", "I", "W")


def compute_actions(schedule: Any) -> Iterator[Action]:
    """Yield the compute actions (F, B, I and W) of this rank in a pass, in order."""
    if isinstance(schedule, PipelineScheduleSingle):
        yield from _of_one_stage(schedule, schedule._stage, schedule._n_microbatches)
        return
    for action in schedule.pipeline_order_with_comms[schedule.rank]:
        for part in action.sub_actions or (action,):
            if part.computation_type.value in _COMPUTES:
                yield part.stage_index, part.computation_type.value, part.microbatch_index


def _of_one_stage(schedule: Any, stage: Any, micro_batches: int) -> Iterator[Action]:
    """Yield the actions of a rank with one stage.

    Under GPipe all forwards come first; under 1F1B as many as there are stages from this one to the last.
    """
    ahead = micro_batches
    if isinstance(schedule, Schedule1F1B):
        ahead = min(micro_batches, stage.num_stages - stage.stage_index)
    yield from ((stage.stage_index, "F", index) for index in range(ahead))
    for index in range(micro_batches):
        yield stage.stage_index, "B", index
        if index + ahead < micro_batches:
            yield stage.stage_index, "F", index + ahead
