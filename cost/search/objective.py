"""Objective of a search: the cost of evaluated candidates, and lower bounds of it for nodes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from legoai.cost.kernels.model_flops import model_flops
from legoai.cost.profiles import ProfileError
from legoai.cost.search.candidate_bounds.bounds import Bounds, BoundsOf
from legoai.cost.search.candidates import Evaluated
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.magnitudes.flops import DECODERS
from legoai.dsl.analysis.parallelism.mesh import number_of_devices
from legoai.dsl.open_plan import Candidate
from legoai.specs.directives.hole import Undecided
from legoai.specs.directives.require import METRICS, Objective, Requirement

_SHORTER: Final = (("minimize", "step_time"), ("maximize", "tokens_per_s"), ("maximize", "mfu"))
"""What is better if and only if a step is shorter, where model, batch and devices are decided."""


SMALL_GAP: Final = 0.005
"""Gap that is not reduced further by default, as a share."""
_ROUNDED: Final = 1e-9
"""Share by which a bound and a cost may differ by rounding alone."""
_DIGITS: Final = 12
"""Digits to which costs are compared."""


def is_timed(objective: Objective) -> bool:
    """Whether the shorter of two steps of the same batch on the same devices is the better."""
    return (objective.direction, objective.metric) in _SHORTER


def objective_of(plan_objective: Objective | None) -> Objective:
    """What is optimised: the plan's objective, or the time of a step."""
    return plan_objective or Objective(direction="minimize", metric="step_time")


def rounded(cost: float) -> float:
    """A cost as it is compared with others: equal sums of many kernels may differ in their last digits."""
    return float(f"{cost:.{_DIGITS}g}")


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of the candidates of one plan.

    Args:
        objective: what is optimised.
        bounds: of candidates.
        gap: share of the best candidate's cost below which a gap is not reduced further, by what is not tried one by
            one.
        exact: whether candidates that are tried one by one are looked at as long as any may be better.
    """

    objective: Objective
    bounds: BoundsOf
    gap: float = SMALL_GAP
    exact: bool = True

    def of(self, candidate: Evaluated) -> float:
        """What is minimised: the objective, negative where it is maximised."""
        dimension = METRICS[self.objective.metric].dimensions[0]
        value = candidate.figures.metric(self.objective.metric, dimension)
        return value if self.objective.direction == "minimize" else -value

    def order(self, candidate: Evaluated) -> tuple[float, float]:
        """What the best candidate has the least of: its cost, and of equal ones reserved memory."""
        return rounded(self.of(candidate)), candidate.figures.reserved

    def is_less(self, bound: float, best: float) -> bool:
        """Whether a bound is below the best candidate's cost by more than rounding."""
        return bound < best and not math.isclose(bound, best, rel_tol=_ROUNDED)

    def nearly(self, best: float) -> float:
        """The cost below which the bound of a gap is raised further, by that of the best candidate."""
        return best - self.gap * abs(best) if math.isfinite(best) else best

    def limit(self, best: float) -> float:
        """The cost below which a candidate is looked at, by that of the best one."""
        return best if self.exact else self.nearly(best)

    def expect(self, best: Evaluated | None) -> None:
        """Let bounds of time be found no closer than it takes to say that a candidate is not looked at."""
        self.bounds.enough = math.inf
        if best is not None and is_timed(self.objective):
            gap = 0.0 if self.exact else self.gap
            share = 1.0 - gap if self.objective.direction == "minimize" else 1.0 / (1.0 + gap)
            self.bounds.enough = best.figures.step_time * share

    @contextlib.contextmanager
    def in_full(self) -> Iterator[None]:
        """Find bounds of time, and of memory, as close as they are found."""
        before, self.bounds.enough = self.bounds.enough, math.inf
        try:
            yield
        finally:
            self.bounds.enough = before

    def value(self, cost: float) -> float:
        """The objective at a cost."""
        return cost if self.objective.direction == "minimize" else -cost

    def bounded(self, candidate: Candidate, least: float) -> float | None:
        """A bound of the cost, which is at least another; None where a bound excludes the candidate.

        Where time is what counts, and bounded by what is expected or more, memory is not bounded.
        """
        if candidate.analysis is None:
            return least
        seconds = self.bounds.step_time(candidate.analysis)
        if self.bounds.enough <= seconds < math.inf:
            return max(least, self.least(Bounds(step_time=seconds), candidate))
        bounds = self.bounds(candidate.analysis, seconds)
        if self._is_full(candidate.analysis, bounds) or any(_excludes(bounds, item) for item in candidate.plan.require):
            return None
        return max(least, self.least(bounds, candidate))

    def _is_full(self, analysis: Analysis, bounds: Bounds) -> bool:
        """Whether a device has no room for what a rank needs at least."""
        try:
            return self.bounds.for_tensors(analysis) < bounds.memory
        except Undecided:
            return False

    def capacity(self, candidate: Candidate) -> float:
        """Bytes of a device's memory; infinite where that is not known."""
        assert candidate.analysis is not None
        try:
            return self.bounds.room(candidate.analysis).device
        except Undecided:
            return math.inf

    def least(self, bounds: Bounds, candidate: Candidate) -> float:
        """A bound of the cost."""
        metric = self.objective.metric
        if self.objective.direction == "minimize":
            return _least(bounds).get(metric, -math.inf)
        analysis, batch = candidate.analysis, candidate.plan.batch
        if bounds.step_time <= 0.0 or candidate.errors or analysis is None:
            return -math.inf
        device_seconds = bounds.step_time * (number_of_devices(analysis) or 1)
        if metric == "tokens_per_s":
            return -batch.global_batch * (batch.seq_len or 1) / device_seconds
        if metric == "mfu" and analysis.manifest is not None and candidate.plan.model.family in DECODERS:
            with contextlib.suppress(Undecided, ProfileError):
                peak, _ = self.bounds.machine(analysis).peak(candidate.plan.precision.param)
                return -model_flops(candidate.plan, analysis.manifest, {}, lambda: 0)[0] / device_seconds / peak
        return -math.inf


def _least(bounds: Bounds) -> dict[str, float]:
    """Least values of figures, where bounds give any: nothing is known of what takes 0 at least."""
    known = {"step_time": bounds.step_time, "peak_memory": bounds.memory, "reserved_memory": bounds.memory}
    return {metric: least for metric, least in known.items() if least > 0.0}


def _excludes(bounds: Bounds, item: Requirement) -> bool:
    """Whether no plan with these bounds can meet a requirement."""
    least = _least(bounds)
    return item.metric in least and item.bounds_above and least[item.metric] > item.bound
