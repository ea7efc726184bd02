"""Joint decision of the holes that determine memory: an integer program, corrected by simulating its answers.

The holes are those without a domain: for the treatment of all blocks, in `checkpoint` and in `fsdp`, and for offloading
the optimizer's state. First the listed values are simulated, which give all blocks one treatment. Their observed costs
make a :class:`~legoai.cost.search.memory.program.MemoryProblem`, whose solutions treat the first blocks differently
from the others, or under a pipeline a :class:`~legoai.cost.search.memory.stage_program.StagedMemoryProblem`, whose
solutions have rules for each stage. Solutions are simulated; the error of their predicted memory corrects the memory
limit of the problem, until the solution no longer changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from legoai.cost.search.candidates import Choices, Evaluated
from legoai.cost.search.evaluation.evaluator import Figures
from legoai.cost.search.joint.holes import MemoryHoles, Values, Written
from legoai.cost.search.joint.observed import ObservedMemory, beside_what_is_of
from legoai.cost.search.joint.stages import ObservedStageMemory
from legoai.cost.search.objective import Costs
from legoai.cost.search.stages.action_graph import graph_of
from legoai.cost.search.stages.costs import Room, blocks_of_stages
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.stages.pipeline import is_staged
from legoai.dsl.open_plan import OpenPlan

MOST_ROUNDS: Final = 6
"""Limit of solved programs for one choice of the other holes."""


class _Observed(Protocol):
    """Observed costs of listed values, with or without stages; the type of problem and division follows from that."""

    every: Mapping[Values, Figures]

    def problem(self, room: Room) -> Any:
        """The problem with the observed costs."""

    def corrected(self, problem: Any, written: Written, seen: Figures) -> Any:
        """The problem with limits corrected by a simulated solution."""

    def predicted(self, problem: Any, division: Any) -> float:
        """Predicted seconds of a step."""

    def written(self, division: Any) -> Written:
        """A solution in terms of the holes' values."""

    def values(self, written: Written) -> Values:
        """The holes' values for a solution; new values are added to the plan."""

    def alike(self, written: Written) -> list[Values]:
        """The listed values that give all blocks one of the solution's pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A solution of the joint problem.

    Attributes:
        choices: choice of each hole of the plan.
        predicted: predicted seconds of a step.
        found: its simulation; None before it, or where it failed.
    """

    choices: Choices
    predicted: float
    found: Evaluated | None = None


@dataclass(slots=True, kw_only=True)
class JointAnswers:
    """Joint solutions for one choice of the other holes.

    Attributes:
        programs: number of solved programs.
        program: the last solution of the program.
        greedy: the last greedy solution; None where there is none.
        asked: candidates that were requested already.
        written: each joint solution in terms of the holes' values.
    """

    programs: int = 0
    program: Tried | None = None
    greedy: Tried | None = None
    asked: set[Choices] = field(default_factory=set)
    written: dict[Choices, Written] = field(default_factory=dict)


class JointMemory:
    """Joint decision of the memory holes of a plan.

    Args:
        plan: the plan, with its holes.
    """

    def __init__(self, plan: OpenPlan) -> None:
        self.holes = MemoryHoles(plan)
        self.answers: dict[Choices, JointAnswers] = {}

    def largest_gain(self, groups: Mapping[Choices, Sequence[Evaluated]], costs: Costs) -> float:
        """The largest gain of a joint solution over the best listed values, over all choices of the other holes.

        Infinite where no joint solution was evaluated.

        Args:
            groups: the evaluated candidates, by the choices of the other holes.
            costs: costs of candidates.
        """
        most = -math.inf
        for group in self.answers:
            feasible = [item for item in groups.get(group, ()) if item.feasible]
            listed = [costs.of(item) for item in feasible if self.holes.are_listed(item.choices)]
            joint = [costs.of(item) for item in feasible if not self.holes.are_listed(item.choices)]
            if listed and joint:
                most = max(most, min(listed) - min(joint))
        return most if self.answers and math.isfinite(most) else math.inf

    def next_candidates(
        self,
        group: Choices,
        groups: Mapping[Choices, Sequence[Evaluated]],
        room: Room,
        analysis: Analysis,
    ) -> list[Choices]:
        """Candidates to evaluate next for one choice of the other holes; none when the solution is final.

        Args:
            group: the choices of the other holes.
            groups: the evaluated candidates by the choices of the other holes, in the order of their evaluation.
            room: memory limits of a rank.
            analysis: analysis of one of these candidates.

        Raises:
            SolverMissingError: no solver is installed.
            SolverFailedError: the solver ended without an answer.
        """
        state, holes, evaluated = self.answers.setdefault(group, JointAnswers()), self.holes, groups[group]
        known = {item.choices: item for item in evaluated}
        self._record(state, known)
        figures = {holes.values(item.choices): item.figures for item in evaluated}
        observed = ObservedStageMemory if is_staged(analysis) else ObservedMemory
        alike = [item for item in evaluated if observed.are_usable(item.figures) and holes.are_listed(item.choices)]
        if not alike:
            return []
        best = min(
            alike,
            key=lambda item: (not item.feasible, item.figures.step_time if item.feasible else item.figures.reserved),
        )
        own = holes.values(best.choices)
        if not is_staged(analysis):
            figures = {**self._beside_others(group, groups, best), **figures}
        probes = [holes.chosen(group, one) for one in holes.around(own) if one not in figures]
        probes = [one for one in probes if one not in state.asked]
        if probes or state.programs >= MOST_ROUNDS:
            state.asked.update(probes)
            return probes
        if not is_staged(analysis):
            return self._solve(state, group, known, ObservedMemory(holes, own, figures), room)
        graph = graph_of(analysis)
        if graph is None:
            return []
        return self._solve(
            state, group, known, ObservedStageMemory(holes, own, figures, graph, blocks_of_stages(analysis)), room
        )

    def _beside_others(
        self, group: Choices, groups: Mapping[Choices, Sequence[Evaluated]], own: Evaluated
    ) -> dict[Values, Figures]:
        """Figures of listed values that were simulated beside other choices, corrected by what one of them differs.

        Args:
            group: the choices of the other holes.
            groups: the evaluated candidates by these choices.
            own: a candidate of the group, whose values were simulated beside the other choices too.
        """
        found: dict[Values, Figures] = {}
        for other, evaluated in groups.items():
            if other != group and self.holes.share_blocks(group, other):
                figures = {self.holes.values(item.choices): item.figures for item in evaluated}
                base = figures.get(self.holes.values(own.choices))
                alike = [item for item in evaluated if self.holes.are_listed(item.choices)]
                values = [self.holes.values(item.choices) for item in alike if item.figures.micro_batch.steady]
                if base is not None and own.figures.micro_batch.steady and self.holes.values(own.choices) in values:
                    found |= {one: beside_what_is_of(own.figures, figures[one], base) for one in values}
        return found

    def _solve(
        self,
        state: JointAnswers,
        group: Choices,
        known: Mapping[Choices, Evaluated],
        observed: _Observed,
        room: Room,
    ) -> list[Choices]:
        problem = observed.problem(room)
        last = None if state.program is None else known.get(state.program.choices)
        if last is not None:
            problem = observed.corrected(problem, state.written[last.choices], last.figures)
        state.programs += 1

        def tried(division: Any) -> Tried | None:
            if division is None:
                return None
            written = observed.written(division)
            choices = self.holes.chosen(group, observed.values(written))
            state.written[choices] = written
            return Tried(choices=choices, predicted=observed.predicted(problem, division), found=known.get(choices))

        state.program, state.greedy = tried(problem.solve().division), tried(problem.greedy())
        asked: list[Choices] = []
        for one in (state.program, state.greedy):
            if one is not None:
                beside = [
                    values for values in observed.alike(state.written[one.choices]) if values not in observed.every
                ]
                asked += [one.choices, *(self.holes.chosen(group, values) for values in beside)]
        new = [choices for choices in dict.fromkeys(asked) if choices not in known and choices not in state.asked]
        state.asked.update(new)
        return new

    def _record(self, state: JointAnswers, known: Mapping[Choices, Evaluated]) -> None:
        """Record the simulations of the last solutions."""
        if state.program is not None:
            state.program = replace(state.program, found=known.get(state.program.choices))
        if state.greedy is not None:
            state.greedy = replace(state.greedy, found=known.get(state.greedy.choices))
