"""On-disk cache of the results of searches.

Figures of candidates are cached too, but what bounds the other candidates takes seconds where many holes are open. A
search that its time limit stopped would take the whole limit again, and find slightly more, or on a busy machine
slightly less.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from legoai.cost.replay.plan_key import state_of_model
from legoai.cost.search.candidates import Choices, Evaluated, evaluated
from legoai.cost.search.evaluation.evaluator import Figures
from legoai.cost.search.evaluation.figures_cache import read_checked, state_file, write_checked
from legoai.cost.search.joint.decision import JointAnswers, Tried
from legoai.cost.search.result import SearchResult
from legoai.dsl.frontend.parsing.suppress import suppressions
from legoai.dsl.frontend.syntax import SolvedLine
from legoai.dsl.open_plan import OpenPlan
from legoai.runtime.linear_program import installed
from legoai.specs.directives.base import describe
from legoai.specs.plan import Plan, holes_of
from legoai.specs.span import Span

Texts = list[str | None]
"""For each hole its answer as a plan writes it; None where it is open."""


_COSTLESS: Final = ("name", "seed", "steps")
"""Statements that change nothing of a step."""
_SCALARS: Final = ("optimizer", "clip", "schedule")
"""Statements whose numbers are scalars of a step's kernels."""


_QUICK: Final = 1.0
"""Seconds; the results of searches that end by themselves within this time are not cached."""


@dataclass(frozen=True, slots=True)
class CachedResult:
    """The result of a search.

    Attributes:
        time_limit: seconds after which the search was stopped; None if it ended by itself.
        simulated: different programs among the evaluated candidates.
        found: what it found, as plain data.
    """

    time_limit: float | None
    simulated: int
    found: dict[str, Any]

    @classmethod
    def of(
        cls, plan: OpenPlan, found: SearchResult, *, seconds: float, time_limit: float | None, simulated: int
    ) -> CachedResult | None:
        """What is cached of a search that took so long; None if it was quick, was interrupted, or found nothing."""
        if found.status == "time_limit":
            cached = time_limit is not None
        else:
            cached, time_limit = found.status in ("optimal", "bounded") and seconds > _QUICK, None
        if not cached or found.best is None or found.bucketings:
            return None
        place = {item.choices: index for index, item in enumerate(found.evaluated)}

        def tried(one: Tried | None) -> list[Any] | None:
            return None if one is None else [_texts(plan, one.choices), one.predicted, place.get(one.choices)]

        return cls(
            time_limit,
            simulated,
            {
                "status": found.status,
                "bound": found.bound,
                "best": place[found.best.choices],
                "evaluated": [[_texts(plan, item.choices), item.figures.document()] for item in found.evaluated],
                "failed": [[_texts(plan, choices), reason] for choices, reason in found.failed],
                "counts": {"total": found.total, "bounded": found.bounded, "left_out": found.left_out},
                "refused": dict(found.refused),
                "joint": [
                    [_texts(plan, group), answers.programs, tried(answers.program), tried(answers.greedy)]
                    for group, answers in found.joint.items()
                ],
            },
        )

    def answers(self, time_limit: float | None) -> bool:
        """Whether a search with this limit would have no more time."""
        return self.time_limit is None or (time_limit is not None and time_limit <= self.time_limit)

    def again(self, plan: OpenPlan) -> SearchResult:
        """What was found, for the same plan."""
        held = self.found
        items = [_evaluated(plan, texts, figures) for texts, figures in held["evaluated"]]

        def tried(one: list[Any] | None) -> Tried | None:
            if one is None:
                return None
            texts, predicted, place = one
            found = None if place is None else items[place]
            return Tried(choices=_choices(plan, texts), predicted=predicted, found=found)

        return SearchResult(
            status=held["status"],
            best=items[held["best"]],
            bound=held["bound"],
            evaluated=items,
            failed=[(_choices(plan, texts), reason) for texts, reason in held["failed"]],
            refused=Counter(held["refused"]),
            joint={
                _choices(plan, group): JointAnswers(programs=programs, program=tried(program), greedy=tried(greedy))
                for group, programs, program, greedy in held["joint"]
            },
            **held["counts"],
        )


def result_file(plan: OpenPlan, devices: str, gap: float | None = None) -> Path | None:
    """The file of the result for a plan to within a gap, whatever answers it has; None where nothing can be kept.

    Args:
        plan: with its holes.
        devices: on which it runs, by :func:`legoai.cost.search.evaluation.figures_cache.identity_of`.
        gap: share by which a better candidate need not be found.
    """
    if plan.analysis is None:
        return None
    holes = [[hole.what, *hole.choices[: hole.listed]] for hole in plan.holes]
    asked = plan.analysis.plan
    places = list(_places(plan, asked))
    accepted = sorted(_accepted(plan))
    solver, model = str(installed()), state_of_model(plan.analysis)
    question = [devices, _what_costs(asked), asked.goals(), holes, places, accepted, solver, gap, model]
    return state_file("results", json.dumps(question, sort_keys=True))


def _places(plan: OpenPlan, asked: Plan) -> Iterator[list[str | int | None]]:
    """Which hole is where: for each statement its rules as written, and the indices of the holes in it, in this order.

    A hole that a `let` names may be in several places.
    """
    indices: dict[Span | None, int] = {hole.span: index for index, hole in enumerate(plan.holes)}
    for directive in asked.directives():
        found = [indices.get(item.hole.span) for item in holes_of(directive)]
        if found:
            yield [directive.keyword, *directive.axes, *(rule.path for rule in directive.rules), *found]


def _accepted(plan: OpenPlan) -> Iterator[tuple[str, int, int, int]]:
    """Which diagnostics are accepted in which lines of which statements: an accepted error forbids no candidate."""
    for file in plan.resolution.files.values():
        statements = [item.span for item in file.statements if not isinstance(item, SolvedLine)]
        for item in suppressions(file):
            for index, span in enumerate(statements):
                if span.line < item.lines.stop and item.lines.start <= span.end_line:
                    yield item.code, index, item.lines.start - span.line, item.lines.stop - span.line


def _what_costs(plan: Plan) -> dict[str, Any]:
    """What of a plan decides what its candidates cost: a step is the same at other learning rates and with other seeds.

    A number of the optimizer, of clipping or of the schedule is a scalar of the same kernels, unless it is zero, which
    may leave one out. Whole numbers are as they are: they may count iterations, but for those of a schedule's steps.
    """
    body = {name: value for name, value in plan.canonical().items() if name not in _COSTLESS}
    scalars = {name: getattr(plan, name) for name in _SCALARS}
    kinds: dict[str, tuple[type, ...]] = {"schedule": (int, float)}
    described = {name: describe(one) for name, one in scalars.items() if one is not None}
    return body | {name: _whether_zero(value, kinds.get(name, (float,))) for name, value in described.items()}


def _whether_zero(value: Any, kinds: tuple[type, ...]) -> Any:
    """Plain data, of each number of some kinds only whether it is zero."""
    if isinstance(value, dict):
        return {name: _whether_zero(item, kinds) for name, item in value.items()}
    if isinstance(value, list):
        return [_whether_zero(item, kinds) for item in value]
    return bool(value) if isinstance(value, kinds) else value


def read_result(path: Path | None) -> CachedResult | None:
    """The result in a file; None where there is nothing that can be read."""
    held = read_checked(path)
    return None if held is None else CachedResult(**held)


def write_result(path: Path | None, result: CachedResult | None) -> None:
    """Cache the result of a search, if there is a place for it."""
    if result is not None:
        held = {"time_limit": result.time_limit, "simulated": result.simulated, "found": result.found}
        write_checked(path, held)


def _texts(plan: OpenPlan, choices: Choices) -> Texts:
    holes = zip(plan.holes, choices, strict=True)
    return [None if index is None else hole.choices[index] for hole, index in holes]


def _choices(plan: OpenPlan, texts: Sequence[str | None]) -> Choices:
    """The choices that are written so; values beyond the listed ones are added."""
    return tuple(None if text is None else plan.add(index, text) for index, text in enumerate(texts))


def _evaluated(plan: OpenPlan, texts: Sequence[str | None], figures: dict[str, Any]) -> Evaluated:
    choices = _choices(plan, texts)
    return evaluated(choices, plan.candidate(choices), Figures.read(figures))
