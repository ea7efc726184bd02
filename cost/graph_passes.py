"""Estimates of a step after each graph pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from legoai.cost.estimate import Estimate, Progress, estimate
from legoai.dsl.analysis.analysis import Analysis
from legoai.lowering.program import lower, pass_names

TRACED: Final = "as traced"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassEstimate:
    """Estimate of a step whose graph was rewritten by the first few of its passes.

    Attributes:
        name: of the last pass that ran; :data:`TRACED` for none.
        count: of the passes that ran.
        estimate: of the step with this graph.
    """

    name: str
    count: int
    estimate: Estimate = field(repr=False)


def pass_estimates(
    analysis: Analysis,
    *,
    profile: str | None = None,
    rank: int | None = None,
    between: bool = True,
    progress: Progress | None = None,
) -> tuple[PassEstimate, ...]:
    """Simulate the program of a plan with `backend = graph` as it is traced, and after each pass in turn.

    Args:
        analysis: of the plan.
        profile: of other devices than the plan's; see :func:`legoai.cost.machine.cluster.machine_of`.
        rank: global rank that is simulated.
        between: whether the step is also simulated after passes other than the last.
        progress: called with a description of the current work.

    Returns:
        The estimate as traced, and those after passes; the last is that of the plan.

    Raises:
        CannotEstimateError: the program cannot be simulated, with all or some of its passes.
    """
    assert analysis.manifest is not None
    names = pass_names(analysis)
    assert names, "a plan whose step is traced"
    found = []
    for count, name in enumerate((TRACED, *names)):
        if not between and 0 < count < len(names):
            continue
        if progress is not None:
            progress(f"simulating the step {name if not count else f'after {name}'}")
        program = lower(analysis, passes=count)
        done = estimate(
            program, analysis.plan, analysis.manifest, directory=analysis.directory, profile=profile, rank=rank
        )
        found.append(PassEstimate(name=name, count=count, estimate=done))
    return tuple(found)
