"""Solution of a plan with holes: the best choices, their optimality gap, baselines, and the completed text."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import legoai
from legoai.cost import words
from legoai.cost.machine.cluster import machine_of
from legoai.cost.profiles import ProfileError
from legoai.cost.search.baselines import Baseline, baselines
from legoai.cost.search.branch_and_bound.tree import Search
from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.candidates import Choices, Evaluated
from legoai.cost.search.evaluation.evaluator import Evaluator
from legoai.cost.search.evaluation.figures_cache import identity_of
from legoai.cost.search.evaluation.workers import WorkerKilledError
from legoai.cost.search.joint.decision import JointAnswers
from legoai.cost.search.joint.holes import divisible
from legoai.cost.search.objective import Costs, objective_of, rounded
from legoai.cost.search.result import Progress, SearchResult, Status
from legoai.cost.search.results_cache import CachedResult
from legoai.cost.search.state import SearchState
from legoai.dsl.analysis.question import solved_digest
from legoai.dsl.diagnostics.codes.budgets import OutOfMemory, RequirementsConflict
from legoai.dsl.diagnostics.codes.lowering import NoLegalAnswers
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.formatting import edit
from legoai.dsl.frontend.parsing.parse import parse
from legoai.dsl.frontend.syntax import PlanFile
from legoai.dsl.open_plan import OpenPlan
from legoai.runtime.linear_program import SolverFailedError, SolverMissingError
from legoai.specs.cluster import CatalogueError
from legoai.specs.directives.cluster import ClusterUse
from legoai.specs.directives.hole import Hole
from legoai.specs.directives.require import METRICS, Objective, Requirement
from legoai.specs.plan import Solved
from legoai.specs.span import Span
from legoai.specs.units import counted

_STOPPED: Final[Mapping[Status, str]] = {"time_limit": "came to its time limit", "interrupted": "was interrupted"}
"""What became of a search that did not end by itself, in words."""


class _Searches(Protocol):
    def __call__(self, without: Sequence[Span] = (), *, first_feasible: bool = False) -> SearchResult:
        """Search without some requirements."""


class CannotSolveError(ValueError):
    """A plan that cannot be solved; the message says why, for the plan's author."""


@dataclass(slots=True, kw_only=True)
class Solution:
    """What solving a plan comes to.

    Attributes:
        plan: with its holes.
        objective: what was optimised.
        result: the candidates, the best of them, and the bound.
        seconds: that the search took.
        simulated: different programs among the candidates, evaluated or failed, the baselines and the probes.
        baselines: what the best is compared with.
        diagnostics: why there is no solution.
    """

    plan: OpenPlan
    objective: Objective
    result: SearchResult
    seconds: float
    simulated: int = 0
    baselines: tuple[Baseline, ...] = ()
    diagnostics: list[Diagnostic] = field(default_factory=list)

    @property
    def best(self) -> Evaluated | None:
        """The best candidate that fits its devices and meets every requirement."""
        return self.result.best

    @property
    def value(self) -> float | None:
        """The objective of the best candidate."""
        return None if self.best is None else self.of(self.best)

    @property
    def gap(self) -> float | None:
        """How much better than the best candidate any could be, as a share of its objective; None if not known."""
        if self.value is None or self.result.bound is None:
            return None
        return abs(self.value - self.result.bound) / abs(self.value) if self.value else 0.0

    @property
    def joint(self) -> JointAnswers | None:
        """The joint answers of the holes that decide memory, beside the best candidate's of the others, if any."""
        best = self.best
        if best is None:
            return None
        groups = self.result.joint.items()
        fixed = (
            (
                answers,
                [answers.programs > 0]
                + [one == own for one, own in zip(group, best.choices, strict=True) if one is not None],
            )
            for group, answers in groups
        )
        return next((answers for answers, same in fixed if all(same)), None)

    def of(self, candidate: Evaluated) -> float:
        """A candidate's objective."""
        return candidate.figures.metric(self.objective.metric, METRICS[self.objective.metric].dimensions[0])

    def ranked(self) -> list[Evaluated]:
        """The evaluated candidates, best first; behind them those that are not feasible."""
        sign = 1 if self.objective.direction == "minimize" else -1
        return sorted(
            self.result.evaluated,
            key=lambda item: (not item.feasible, rounded(sign * self.of(item)), item.figures.reserved),
        )

    def replaced(self, choices: Choices) -> Iterator[str]:
        """The answers that a candidate's replace and that the plan has without its variant and settings too."""
        for hole, index in zip(self.plan.holes, choices, strict=True):
            if index is not None and hole.answer not in (None, hole.choices[index]) and self.plan.is_shared(hole):
                yield f"{hole.what}: {hole.answer} → {hole.choices[index]}"

    def text(self, choices: Choices, *, pinned: bool = False, record: bool = True) -> str:
        """The plan's text with a candidate's answers behind its holes, and the solver's line.

        Args:
            choices: of the candidate.
            pinned: write plain values in the place of the holes that were searched, and no line of the solver.
            record: write the solver's line, if the plan was searched without variant and settings, with which its
                answers may be others; else one that the plan has stays where it is of these answers.
        """
        file = self.plan.resolution.file
        answers = {
            hole.span: hole.choices[index]
            for hole, index in zip(self.plan.holes, choices, strict=True)
            if index is not None
        }
        text = edit.write_answers(file, answers)
        if pinned:
            written, searched = _file(text, file.name), {hole.span for hole in self.plan.holes}
            spans = [
                hole.span
                for hole, before in zip(edit.holes(written), edit.holes(file), strict=True)
                if before.span in searched and hole.answer is not None
            ]
            return edit.without_solved(_file(edit.pin(written, spans), file.name))
        if not record or self.best is None or not self.plan.is_alone:
            alone = self.plan.alone(text)
            held = None if alone.plan is None else alone.plan.solved
            is_of_them = held is not None and held.digest == solved_digest(alone)
            return text if is_of_them else edit.without_solved(_file(text, file.name))
        status = self.result.status
        solved = Solved(
            digest=solved_digest(self.plan.reread(text)),
            version=legoai.__version__,
            profile=self.best.figures.profile,
            gap=None if self.gap is None else round(self.gap, 6),
            stopped=status if status in ("time_limit", "interrupted") else None,
        )
        return edit.write_solved(_file(text, file.name), solved)


def solve(
    plan: OpenPlan,
    evaluator: Evaluator,
    *,
    profile: str | None = None,
    time_limit: float | None = None,
    gap: float | None = None,
    progress: Progress | None = None,
    cached: CachedResult | None = None,
) -> Solution:
    """Find the answers of a plan's holes that are best for its objective, and meet its requirements.

    Args:
        plan: with its holes, none of them refused.
        evaluator: of candidates.
        profile: of other devices than the plan's.
        time_limit: seconds after which the best so far is the result.
        gap: share by which a better candidate need not be found; None for none where answers are few, else 0.5%.
        progress: called with the state of the search.
        cached: what an earlier search found, which is the result where it had no less time.

    Raises:
        CannotSolveError: nothing is known of the speed of the devices, a process was killed, or styles are open and
            no solver of integer programs is installed, or it failed.
    """
    assert not plan.refused, "a hole that is not searched"
    begin = time.monotonic()
    deadline = None if time_limit is None else begin + time_limit
    objective = objective_of(plan.resolution.plan.objective if plan.resolution.plan is not None else None)
    bounds = BoundsOf(profile)
    devices_of(plan, profile)

    def search(without: Sequence[Span] = (), *, first_feasible: bool = False) -> SearchResult:
        return Search(
            plan, bounds=bounds, evaluator=evaluator, objective=objective, without=without,
            first_feasible=first_feasible, gap=gap, deadline=deadline, progress=progress,
        ).run()  # fmt: skip

    earlier = cached if cached is not None and cached.answers(time_limit) else None
    try:
        if earlier is None:
            found = search()
        else:
            found = earlier.again(plan)
            deadline = deadline if earlier.time_limit is None else begin  # no time is left, as there was none
        solution = Solution(plan=plan, objective=objective, result=found, seconds=0.0)
        state = SearchState(plan=plan, costs=Costs(objective, bounds), deadline=deadline, found=found)
        searched = evaluator.simulated
        _compare(solution, search, evaluator, state)
    except (WorkerKilledError, SolverMissingError, SolverFailedError) as error:
        raise CannotSolveError(str(error)) from error
    if earlier is not None:
        solution.simulated = earlier.simulated
    else:  # searches without some requirements, which explain why there is no solution, have candidates of their own
        solution.simulated = searched if found.best is None else evaluator.simulated
    solution.seconds = time.monotonic() - begin
    return solution


def _compare(solution: Solution, search: _Searches, evaluator: Evaluator, state: SearchState) -> None:
    """Add what the best candidate is compared with, or why there is none."""
    found = state.found
    try:
        if found.status == "infeasible":
            solution.diagnostics = state.plan.as_written(_why_infeasible(state.plan, found, search))
        elif found.best is not None:
            solution.baselines = tuple(baselines(state, evaluator))
    except KeyboardInterrupt:
        found.status = "interrupted"


def _file(text: str, name: str) -> PlanFile:
    return parse(text, name).file


def devices_of(plan: OpenPlan, profile: str | None) -> str:
    """The :func:`identity_of` a plan's devices, or of ``profile`` in their place.

    Raises:
        CannotSolveError: nothing is known of the speed of the devices.
    """
    assert plan.resolution.plan is not None
    use = plan.resolution.plan.cluster
    if any(isinstance(value, Hole) for value in (use.hosts, use.devices, use.fabric)):
        use = ClusterUse(device=use.device, profile=use.profile)
    try:
        return identity_of(machine_of(use, 1, directory=plan.directory, override=profile))
    except (ProfileError, CatalogueError) as error:
        raise CannotSolveError(str(error)) from error


def _why_infeasible(plan: OpenPlan, found: SearchResult, search: _Searches) -> list[Diagnostic]:
    """The smallest set of requirements that cannot be met together, or why there is no candidate without them."""
    requirements = plan.resolution.plan.require if plan.resolution.plan is not None else ()
    spans = [item.origin.span for item in requirements if item.origin.span is not None]
    without = search(spans, first_feasible=True) if spans else found
    if without.status in _STOPPED and without.best is None:
        found.status = without.status
        return []
    if without.best is None:
        return [_nothing_fits(plan, without)]
    left, searches, untried = list(requirements), [found, without], found.untried
    met: list[Sequence[Requirement]] = []
    for fewer in _smaller(requirements, left, met):
        kept = {other.origin.span for other in fewer}
        tried = search([span for span in spans if span not in kept], first_feasible=True)
        searches.append(tried)
        if tried.status in _STOPPED and tried.best is None:
            found.status = "interrupted" if tried.status == "interrupted" else found.status
            break
        if tried.status == "infeasible":
            left[:], untried = fewer, tried.untried
        else:
            met.append(fewer)
    return [_conflict(left, searches, _untried(plan) if untried else [])]


def _smaller(
    whole: Sequence[Requirement], least: Sequence[Requirement], met: Sequence[Sequence[Requirement]]
) -> Iterator[tuple[Requirement, ...]]:
    """Yield sets of requirements that may be smaller than the least that cannot be met together.

    Leaving out one after the other gives a set of which none can be left out; then all smaller sets are tried that are
    not part of one that can be met.

    Args:
        whole: which cannot be met together.
        least: the least such set that is known; the caller replaces its items by what was yielded.
        met: sets that can be met, to which the caller adds.
    """
    for item in whole:
        yield tuple(other for other in least if other is not item)
    for size in range(1, len(whole)):
        for some in itertools.combinations(whole, size):
            if size >= len(least):
                return
            if not any(_all_in(some, known) for known in met):
                yield some


def _all_in(some: Sequence[Requirement], others: Sequence[Requirement]) -> bool:
    """Whether all of some requirements are among others, by identity."""
    return {id(item) for item in some} <= {id(item) for item in others}


def _untried(plan: OpenPlan) -> list[str]:
    """What values were tried as far as they were likely, in words."""
    kinds = {
        "divisions of blocks (`first(n, …)`)": bool(divisible(plan)),
        "splits into stages": any(hole.assigns for hole in plan.holes),
        "buckets": any(hole.buckets for hole in plan.holes),
        "styles on `tp`": any(hole.line is not None for hole in plan.holes),
    }
    return [kind for kind, is_open in kinds.items() if is_open]


def _conflict(left: Sequence[Requirement], searches: Sequence[SearchResult], untried: Sequence[str]) -> Diagnostic:
    """The conflict of some requirements.

    Args:
        left: of which no candidate meets all.
        searches: for candidates that meet all requirements, and that meet some of them; the last may have been stopped.
        untried: of what values some that were not tried may meet them.
    """
    first, *others = left
    assert first.origin.span is not None
    names = " and ".join(f"`{item.metric} {item.limit}`" for item in left)
    help = [f"relax {'one of them' if others else 'it'}, or give the holes more values to choose from"]
    if others and (stopped := _STOPPED.get(searches[-1].status)) is not None:
        help.append(f"fewer of them may not be met together either: the search for them {stopped}")
    simulated = {done.choices: done.figures for one in searches for done in one.evaluated}
    for item in left:
        values = [figures.metric(item.metric, item.dimension) for figures in simulated.values()]
        if values:
            every = counted(len(values), "simulated candidate")
            best = words.bound(_nearest(item, values), item.dimension)
            help.append(f"the best `{item.metric}` of {every} is {best}, where `{item.limit}` is required")
    if untried:
        help.append(f"{', '.join(untried)} were tried only where they were likely to be best")
    help += _other_styles(searches[0])
    failed = dict(item for one in searches for item in one.failed)
    help += _without_figures(failed)
    tried = " that were tried" if untried else " that can be simulated" if failed else ""
    return RequirementsConflict.at(
        first.origin.span,
        f"no values of the holes{tried} meet {names}" + (" together" if others else ""),
        label="cannot be met" + (" beside the others" if others else ""),
        others=[Label(item.origin.span, "beside this one") for item in others if item.origin.span is not None],
        help=help,
    )


def _nearest(item: Requirement, values: Sequence[float]) -> float:
    """The figure that meets a requirement, or comes nearest to it."""
    if item.bounds_above and item.bounds_below:
        return min(values, key=lambda value: abs(value - item.bound))
    return min(values) if item.bounds_above else max(values)


def _nothing_fits(plan: OpenPlan, found: SearchResult) -> Diagnostic:
    """Why there is no candidate even without requirements: none is legal, none can be simulated, or none fits."""
    assert plan.holes
    span = plan.holes[0].span
    others = [Label(hole.span, "beside this one") for hole in plan.holes[1:]]
    if not found.evaluated and not found.failed:
        reasons = [f"{found.errors[code].message} ({code})" for code, _ in found.refused.most_common(3)]
        return NoLegalAnswers.at(
            span, f"none of the {found.total} ways to fill the holes is legal", label="no legal value",
            others=others, help=reasons,
        )  # fmt: skip
    if not found.evaluated:
        return NoLegalAnswers.at(
            span, "no way to fill the holes can be simulated", label="no candidate", others=others,
            help=[reason for _, reason in found.failed[:1]],
        )  # fmt: skip
    least = min(item.figures.metric("reserved_memory", "bytes") for item in found.evaluated)
    place = plan.resolution.plan.cluster.span_of("device") if plan.resolution.plan is not None else None
    return OutOfMemory.at(
        place or span,
        f"none of {len(found.evaluated)} candidates fits its devices: the smallest reserves {words.size(least)}",
        label="too little memory",
        others=[Label(hole.span, "searched") for hole in plan.holes],
        help=[
            "use more devices, or give the holes values that take less memory",
            *_other_styles(found),
            *_without_figures(dict(found.failed)),
        ],
    )


def _without_figures(failed: Mapping[Choices, str]) -> list[str]:
    """Help where candidates could not be simulated, of which any may meet what the others do not."""
    reasons = list(failed.values())[:1]
    return [f"{counted(len(failed), 'candidate')} could not be simulated: {reason}" for reason in reasons]


def _other_styles(found: SearchResult) -> list[str]:
    """Help where styles were left open, of which few were tried."""
    return ["write the rules of `shard` that are to be tried: of open styles few are"] if found.left_out else []
