"""Styles of a plan's modules on `tp`, chosen together by an integer program once all else of the plan is decided.

The program minimises the costs of the styles (:mod:`legoai.cost.search.placements.costs`), without overlap of kernels
and collectives. The resulting candidate is simulated like any other. Constraints of the language apart from layouts,
such as a number of heads that the ranks must divide, are checked by the lint rules: if they reject a solution, the
styles that the diagnostic names are forbidden, and the program is solved again. What the program ignores, such as the
host's time, may make the styles of the standard layouts the better ones.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from legoai.cost.machine.cluster import Machine
from legoai.cost.search.candidate_bounds.memory_limits import for_tensors
from legoai.cost.search.evaluation.evaluator import OutOfTimeError
from legoai.cost.search.placements.costs import PlacementCosts
from legoai.cost.search.placements.graph import GraphBuilder
from legoai.cost.search.placements.program import Label, Placed, PlacementGraph, place
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.parallelism.shard import Placement, placement, shard_on_tp
from legoai.dsl.analysis.parallelism.styles import NONE
from legoai.dsl.frontend.paths import assign
from legoai.dsl.frontend.statements.layouts import standard_forms
from legoai.dsl.open_plan import OpenPlan
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.hole import Hole
from legoai.specs.directives.shard import Shard, Unplaced
from legoai.specs.span import Span

_MOST_ROUNDS: Final = 8
"""Limit of solutions that lint may reject before the search gives up on the styles of a candidate."""

Choices = tuple[int | None, ...]
Forbidden = frozenset[tuple[int, Label]]
"""Styles of holes, as pairs of hole and label, that must not be chosen together."""


class Styled(NamedTuple):
    """A solution of the program: the choices with its styles, and the bytes that it counts for them."""

    choices: Choices
    bytes: float


@dataclass(slots=True)
class Placements:
    """Completion of the choices of a plan in which nothing but styles is open.

    Args:
        plan: the plan, with its holes.
        machine: gives the machine of a candidate.
    """

    plan: OpenPlan
    machine: Callable[[Analysis], Machine]
    _graphs: dict[tuple[object, bool], tuple[PlacementGraph, set[Forbidden]]] = field(default_factory=dict)
    """Graphs, and styles forbidden by tied parameters, by the key of their costs and whether layouts are followed."""
    _first: dict[object, tuple[PlacementGraph, set[Forbidden], Placed]] = field(default_factory=dict)
    """The same with the solutions before lint, by the key of their costs and the memory limit."""
    _alone: dict[tuple[str, object], frozenset[tuple[int, Label]]] = field(default_factory=dict)
    """Styles that cause an error of a code by themselves, by code and key of costs."""
    _rules: dict[int, dict[Label, PathRule[Any]]] = field(init=False)

    def __post_init__(self) -> None:
        """The rules of each hole of a style."""
        holes = [index for index, hole in enumerate(self.plan.holes) if hole.line is not None]
        self._rules = {hole: dict(enumerate(self.plan.rules_of(hole))) for hole in holes}

    def complete(
        self, choices: Choices, *, without: Sequence[Span] = (), deadline: float | None = None
    ) -> Choices | None:
        """The choices with the program's choices for the styles; None where no styles are legal, or none fit.

        Args:
            choices: choice of each hole; None for styles, and only for these.
            without: spans of `require` lines that are left out.
            deadline: a time of `time.monotonic` at which to stop.

        Raises:
            Undecided: something else is open.
            OutOfTimeError: the deadline has passed.
            SolverMissingError: PuLP or a solver is not installed.
        """
        analysis = self.plan.candidate(choices, without=without).analysis
        assert analysis is not None, "a candidate whose other holes are answered"
        if shard_on_tp(analysis) is None:
            return self._with(choices, dict.fromkeys(self._rules, 0))  # on one rank no style has an effect
        most = for_tensors(analysis, self.machine(analysis))
        found = self.within(choices, most, without=without, deadline=deadline)
        return None if found is None else found.choices

    def within(
        self, choices: Choices, most: float, *, without: Sequence[Span] = (), deadline: float | None = None
    ) -> Styled | None:
        """As :meth:`complete` for several ranks, among styles for which the program counts at most so many bytes."""
        analysis = self.plan.candidate(choices, without=without).analysis
        assert analysis is not None, "a candidate whose other holes are answered"
        costs = PlacementCosts(analysis, self.machine(analysis))
        named = tuple(index for hole, index in zip(self.plan.holes, choices, strict=True) if hole.owner is Shard)
        key = (costs.key, named)
        if (key, most) not in self._first:
            # Allow unknown layouts only where no styles have known layouts from end to end.
            for followed in (True, False):
                if (key, followed) not in self._graphs:
                    graph = self._graph(analysis, costs, followed=followed)
                    self._graphs[key, followed] = graph, set(self._ties(choices, analysis))
                graph, ties = self._graphs[key, followed]
                found = _placed(graph, ties, most, deadline)
                if found.status != "infeasible":
                    break
            self._first[key, most] = graph, ties, found
        graph, ties, found = self._first[key, most]
        forbidden = set(ties)
        for _ in range(_MOST_ROUNDS):
            if found.status == "infeasible":
                break
            complete = self._with(choices, {hole: found.labels.get(hole, 0) for hole in self._rules})
            refused = set(self._refused(complete, key, without))
            if not refused:
                return Styled(complete, found.bytes)
            forbidden |= refused
            found = _placed(graph, forbidden, most, deadline)
        return None

    def usual(self, choices: Choices, *, without: Sequence[Span] = ()) -> list[Choices | None]:
        """The choices with the styles of each form of the model's standard layout; None for one that they cannot have.

        Arguments are those of :meth:`complete`. Lint may refuse the result.
        """
        analysis = self.plan.candidate(choices, without=without).analysis
        assert analysis is not None, "a candidate whose other holes are answered"
        shard = shard_on_tp(analysis)
        if shard is None:
            return []
        paths, open = analysis.paths_for(shard), self._open(analysis)
        found: list[Choices | None] = []
        for form in standard_forms(analysis.plan.model, analysis.directory):
            rules = [PathRule(path=rule.path, treatment=rule.treatment) for rule in form]
            usual = assign(rules, paths).by_path
            wanted: dict[int, set[str]] = {}
            for path, hole in open.items():
                wanted.setdefault(hole, set()).add(usual[path].treatment if path in usual else NONE)
            known = {hole: self.plan.holes[hole].choices for hole in self._rules}
            labels = {
                hole: known[hole].index(min(styles)) for hole, styles in wanted.items() if styles <= {*known[hole]}
            }
            fits = len(labels) == len(wanted) and all(len(styles) == 1 for styles in wanted.values())
            found.append(self._with(choices, {**dict.fromkeys(self._rules, 0), **labels}) if fits else None)
        return found

    def _with(self, choices: Choices, labels: Mapping[int, int]) -> Choices:
        return tuple(labels.get(index, choice) for index, choice in enumerate(choices))

    def _ties(self, choices: Choices, analysis: Analysis) -> Iterator[Forbidden]:
        """Yield the styles under which tied parameters would have different placements."""
        assert analysis.manifest is not None
        nothing, open = self._with(choices, dict.fromkeys(self._rules, 0)), self._open(analysis)
        for first, *others in analysis.manifest.tied_parameters:
            ways = list(self._ways(first, open, nothing))
            for other in others:
                for (left, lies), (right, beside) in itertools.product(ways, self._ways(other, open, nothing)):
                    if (left or right) and not lies.is_like(beside):
                        yield left | right

    def _ways(self, parameter: str, open: Mapping[str, int], nothing: Choices) -> Iterator[tuple[Forbidden, Placement]]:
        """Yield the possible placements of a parameter, each with the style of its module."""
        hole = open.get(parameter.rpartition(".")[0])
        for style in [{}] if hole is None else [{hole: label} for label in range(len(self._rules[hole]))]:
            analysis = self.plan.candidate(self._with(nothing, style)).analysis
            assert analysis is not None
            yield frozenset(style.items()), placement(analysis, parameter)

    def _open(self, analysis: Analysis) -> dict[str, int]:
        """The hole of each module whose style is open."""
        lines = {self.plan.holes[hole].line: hole for hole in self._rules}
        winners = self._winners(analysis)
        return {path: lines[rule.origin.span] for path, rule in winners.items() if isinstance(rule.treatment, Hole)}

    @staticmethod
    def _winners(analysis: Analysis) -> dict[str, PathRule[Any]]:
        """The rule of each module and parameter, open ones included."""
        shard = shard_on_tp(analysis)
        assert shard is not None
        return assign(shard.rules, analysis.paths_for(shard)).by_path

    def _graph(self, analysis: Analysis, costs: PlacementCosts, *, followed: bool) -> PlacementGraph:
        assert analysis.manifest is not None
        winners = self._winners(analysis)
        decided = {path: rule for path, rule in winners.items() if not isinstance(rule.treatment, Hole | Unplaced)}
        open = self._open(analysis)
        return GraphBuilder(analysis.manifest, decided, open, self._rules, costs, followed=followed).build()

    def _refused(self, complete: Choices, key: object, without: Sequence[Span]) -> Iterator[Forbidden]:
        """Yield the styles that a candidate's errors forbid; none without errors.

        An error that a style causes both with these styles and without any other forbids that style. Any other error
        forbids the combination of the styles whose rules it names.
        """
        for error in self.plan.candidate(complete, without=without).errors:
            if (error.code, key) not in self._alone:
                self._alone[error.code, key] = frozenset(self._refused_alone(complete, error.code))
            alone = self._alone[error.code, key]
            spans = [error.label.span, *(other.span for other in error.others)]
            spoken = [hole for hole in self._rules if any(_inside(span, self.plan.holes[hole].line) for span in spans)]
            together = frozenset((hole, complete[hole]) for hole in spoken or self._rules)
            yield from (frozenset({pair}) for pair in alone)
            if not any(pair in alone for pair in together):
                yield together

    def _refused_alone(self, complete: Choices, code: str) -> Iterator[tuple[int, Label]]:
        """Yield the styles that cause an error of this code both alone and with all other choices."""
        nothing = self._with(complete, dict.fromkeys(self._rules, 0))
        for hole, rules in self._rules.items():
            for label in range(1, len(rules)):
                if all(
                    any(error.code == code for error in self.plan.candidate(self._with(beside, {hole: label})).errors)
                    for beside in (nothing, complete)
                ):
                    yield hole, label


def _placed(graph: PlacementGraph, forbidden: Collection[Forbidden], most: float, deadline: float | None) -> Placed:
    left = None if deadline is None else max(0.01, deadline - time.monotonic())
    found = place(graph, forbidden=forbidden, most_bytes=most if math.isfinite(most) else None, time_limit=left)
    if found.status == "stopped":
        raise OutOfTimeError
    return found


def _inside(span: Span, line: Span | None) -> bool:
    return line is not None and span.file == line.file and line.start <= span.start < line.end
