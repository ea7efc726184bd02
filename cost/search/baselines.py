"""Baselines of a search: the candidates that its best one is compared with."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from legoai.cost.search.candidates import Choices, Evaluated, evaluated
from legoai.cost.search.evaluation.evaluator import Evaluator, Figures, OutOfTimeError
from legoai.cost.search.objective import Costs
from legoai.cost.search.state import SearchState
from legoai.dsl.open_plan import Candidate, OpenPlan
from legoai.specs.directives.batch import Batch
from legoai.specs.directives.hole import Undecided
from legoai.specs.directives.mesh import Mesh

_MOST_RULED: Final = 24
"""Candidates that the rule of thumb tries at most."""
_LIKELY: Final = 4
"""Of these, the first ones that are simulated before the search has ended."""

_FiguresOf = Callable[[Choices], Evaluated | None]
"""Evaluates a candidate; None where it is not legal or cannot be simulated."""

_LegalOf = Callable[[Choices], Candidate | None]
"""Lints a candidate, which may have holes; None where it is not legal. It raises where no time is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A candidate that the solution is compared with.

    Attributes:
        name: `rule of thumb`, or `present values`.
        found: the candidate; None where there is none.
        note: why there is none.
    """

    name: str
    found: Evaluated | None
    note: str = ""


def baselines(state: SearchState, evaluator: Evaluator) -> list[Baseline]:
    """What the best candidate of a search is compared with."""
    plan, found = state.plan, state.found
    known = {item.choices: item for item in found.evaluated}

    def figures(choices: Choices) -> Evaluated | None:
        """The candidate, where it is legal and can be simulated."""
        if choices in known:
            return known[choices]
        if found.status not in ("optimal", "bounded"):
            raise OutOfTimeError
        candidate = plan.candidate(choices)
        if candidate.errors or candidate.analysis is None:
            return None
        [outcome] = evaluator.evaluate([candidate.analysis], state.deadline)
        if not isinstance(outcome, Figures):
            return None
        known[choices] = evaluated(choices, candidate, outcome)
        return known[choices]

    result = []
    assert found.best is not None
    answered = any(hole.answer is not None for hole in plan.holes)
    for name, find in (("rule of thumb", _ruled), *([("present values", _present)] if answered else [])):
        try:
            with state.costs.in_full():
                one, note = find(plan, found.best.choices, _legal_in(state), figures, state.costs)
        except OutOfTimeError:
            one, note = None, "out of time"
        result.append(Baseline(name=name, found=one, note=note))
    return result


def likely_baselines(state: SearchState, best: Choices) -> list[Candidate]:
    """The first candidates of the rule of thumb beside the best one of a search, which may yet find a better one.

    Args:
        state: of the search.
        best: choices of the best candidate.
    """
    with state.costs.in_full():
        tried = _not_excluded(_of_rule(state.plan, best, _legal_in(state)), state.costs)
        return [candidate for _, candidate in itertools.islice(tried, _LIKELY)]


def _legal_in(state: SearchState) -> _LegalOf:
    """What lints the candidates of a search as far as they are decided, while there is time."""

    def legal(choices: Choices) -> Candidate | None:
        state.in_time()
        candidate = state.plan.candidate(choices)
        return None if candidate.errors else candidate

    return legal


def _ruled(
    plan: OpenPlan, solved: Choices, legal: _LegalOf, figures: _FiguresOf, costs: Costs
) -> tuple[Evaluated | None, str]:
    """The first candidate of the rule that fits."""
    if not _degrees(plan):
        return None, "no degree and no micro batch is open"
    ordered = _of_rule(plan, solved, legal)
    for way, _ in _not_excluded(ordered, costs):
        one = figures(way)
        if one is not None and one.feasible:
            return one, ""
    return None, "no candidate of the rule fits" if next(ordered, None) is None else f"none of {_MOST_RULED} tried fits"


def _not_excluded(ordered: Iterator[tuple[Choices, Candidate]], costs: Costs) -> Iterator[tuple[Choices, Candidate]]:
    """The first candidates without those that a bound excludes: they do not fit, or violate a requirement."""
    for way, candidate in itertools.islice(ordered, _MOST_RULED):
        if costs.bounded(candidate, -math.inf) is not None:
            yield way, candidate


def _degrees(plan: OpenPlan) -> list[int]:
    """Holes of degrees and of the batch."""
    return [index for index, hole in enumerate(plan.holes) if hole.owner in (Mesh, Batch)]


def _of_rule(plan: OpenPlan, solved: Choices, legal: _LegalOf) -> Iterator[tuple[Choices, Candidate]]:
    """Candidates of the rule of thumb in its order, beside the solved answers of other holes; none without degrees."""
    own = _degrees(plan)
    # A split that was solved for one number of stages suits no other.
    listed = tuple(
        None if index in own else 0 if hole.assigns and value is not None and value >= hole.listed else value
        for index, (hole, value) in enumerate(zip(plan.holes, solved, strict=True))
    )
    return _by_rule(plan, listed, own, legal) if own else iter(())


def _by_rule(plan: OpenPlan, way: Choices, own: Sequence[int], legal: _LegalOf) -> Iterator[tuple[Choices, Candidate]]:
    """Legal candidates with least `tp · pp · cp` first, of these with the largest micro batch, then with least `tp`.

    What decides this order is answered first, so that candidates are linted as far as they are asked for.

    Args:
        plan: with its holes.
        way: answers of all other holes.
        own: holes of degrees and of the batch.
        legal: lints a candidate.
    """
    names = {index: plan.holes[index].option for index in own}
    # Whether there is a pipeline decides what lint says of all else.
    first = [index for name in ("pp", "tp", "cp", "micro") for index in own if names[index] == name]
    begun = list(_answered(plan, [way], first, legal))
    ranks = [_rank(candidate) for _, candidate in begun]
    groups: defaultdict[tuple[int, ...], list[Choices]] = defaultdict(list)
    if None in ranks:  # a degree takes what others leave
        groups[()], first = [way], []
    else:
        for rank, (choices, _) in zip(ranks, begun, strict=True):
            groups[rank or ()].append(choices)
    for _, ways in sorted(groups.items()):
        complete = _answered(plan, ways, [index for index in own if index not in first], legal)
        ranked = [(rank, *one) for one in complete if (rank := _rank(one[1])) is not None]
        yield from (one[1:] for one in sorted(ranked, key=lambda one: one[:2]))


def _answered(
    plan: OpenPlan, ways: Iterable[Choices], holes: Sequence[int], legal: _LegalOf
) -> Iterator[tuple[Choices, Candidate]]:
    """Ways to answer some holes beside some answers, as far as lint allows them."""
    found = list(ways)
    for index in holes:
        more = ((*way[:index], value, *way[index + 1 :]) for way in found for value in range(plan.holes[index].listed))
        found = [way for way in more if legal(way) is not None]
    yield from ((way, candidate) for way in found if (candidate := legal(way)) is not None)


def _rank(candidate: Candidate) -> tuple[int, int, int] | None:
    """What the rule of thumb looks for the least of; None where it is not decided."""
    if candidate.analysis is None:
        return None
    mesh, micro = candidate.plan.mesh, candidate.plan.batch.micro_batch
    try:
        return mesh.tp * mesh.pp * mesh.cp, -micro, mesh.tp
    except Undecided:
        return None


def _present(plan: OpenPlan, _: Choices, __: _LegalOf, figures: _FiguresOf, ___: Costs) -> tuple[Evaluated | None, str]:
    """The plan with the answers that its text has."""
    for index, hole in enumerate(plan.holes):
        # One without a domain may have been solved for, and one that is a name stands for a value that is listed.
        if hole.answer is not None and (hole.free or hole.answer not in hole.choices):
            plan.add(index, hole.answer)
    chosen = tuple(
        hole.choices.index(hole.answer) if hole.answer is not None and hole.answer in hole.choices else None
        for hole in plan.holes
    )
    if None in chosen:
        return None, "not every hole has an answer"
    one = figures(chosen)
    return one, "" if one is not None else "the answers are not legal"
