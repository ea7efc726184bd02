"""Summary of a comparison: the batch, the numbers, the checkpoints and the communication of two plans."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches
from legoai.dsl.differences.checkpoints import Loading, loading
from legoai.dsl.differences.communication import Group, groups_of
from legoai.dsl.differences.comparison import Comparison
from legoai.dsl.differences.numerics import Kind, Reason, numerics
from legoai.specs.directives.hole import Hole, Undecided
from legoai.specs.record import Record


class StepSize(Record):
    """Size of an optimizer step: samples, tokens, and micro batches of one rank; None for undecided values.

    ``ramp`` states whether the first steps are smaller. Without a sequence length, as for images, there are no tokens.
    """

    samples: int | None
    tokens: int | None
    micro_batches: int | None
    ramp: bool


class Communication(Record):
    """The groups of one axis in both plans; None where a plan has none."""

    name: str
    before: Group | None
    after: Group | None


class Summary(Record, kw_only=True):
    """Facts about two plans that need no simulation.

    Attributes:
        steps: size of a step of each plan.
        reasons: the changes that change numbers, the strongest effects first.
        forward: how checkpoints of the first plan load under the second.
        backward: how those of the second load under the first.
        communication: every axis of either plan; None where a mesh has holes.
    """

    steps: tuple[StepSize, StepSize]
    reasons: tuple[Reason, ...]
    forward: Loading
    backward: Loading
    communication: tuple[Communication, ...] | None

    @property
    def numerics(self) -> Kind:
        """The strongest effect on numbers."""
        return self.reasons[0].kind if self.reasons else "none"


def summary(comparison: Comparison) -> Summary:
    """The summary of two plans."""
    before, after = comparison.before.analysis, comparison.after.analysis
    groups = groups_of(before), groups_of(after)
    return Summary(
        steps=(step_size(before), step_size(after)),
        reasons=numerics(comparison.changes, before, after),
        forward=loading(before, after),
        backward=loading(after, before),
        communication=None if groups[0] is None or groups[1] is None else tuple(_paired(groups[0], groups[1])),
    )


def step_size(analysis: Analysis) -> StepSize:
    """Size of an optimizer step of a plan."""
    batch = analysis.plan.batch
    samples, length = (None if isinstance(value, Hole) else value for value in (batch.global_batch, batch.seq_len))
    try:
        count = micro_batches(analysis.plan)
    except Undecided:
        count = None
    tokens = samples * length if samples is not None and length is not None else None
    return StepSize(samples, tokens, count, batch.ramp is not None)


def _paired(before: tuple[Group, ...], after: tuple[Group, ...]) -> Iterator[Communication]:
    old, new = {group.name: group for group in before}, {group.name: group for group in after}
    for name in dict.fromkeys((*old, *new)):
        yield Communication(name, old.get(name), new.get(name))
