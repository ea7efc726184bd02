"""Joint choice of recomputation and resharding for the blocks of each pipeline stage, as an integer program.

The blocks of a stage form a chain of pairs, as the blocks of a model without stages do
(:mod:`legoai.cost.search.memory.program`). Each rank has its own memory limits at the points of its own step: the
backward with the highest peak of each of its stages, with the micro batches in flight there, and the optimizer. The
step time couples the stages: it is the longest path through the schedule's actions
(:class:`~legoai.cost.search.stages.action_graph.ActionGraph`), plus the seconds outside the actions.

For each rank all options that fit are listed, except those that another option dominates in every kind of action. The
program selects one option per rank such that the step is shortest. There are too many paths to write them all down:
the longest paths of each solution become rows, until none is longer than the program's objective. The optimizer's state
is offloaded on all ranks or on none; there is one program for each value of `offload`.

A greedy choice serves as baseline and as upper bound: it starts from the fastest treatments, and changes one block at a
time, by the change that frees missing bytes at the least cost to its own rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

from legoai.cost.search.memory.program import cheapest, one_more
from legoai.cost.search.memory.stage_blocks import RankMemory, Stage, StageBlocks, StageOption, StageRules, times_of
from legoai.cost.search.stages.action_graph import ActionGraph, Path
from legoai.cost.search.stages.assignment import PRECISION, is_close
from legoai.runtime.linear_program import LinearProgram

_MOST_NODES: Final = 5000
"""Node limit of each integer program, which does not depend on the machine as a time limit would."""
_MOST_ROUNDS: Final = 100
"""Limit of integer programs; after it the best solution so far is returned."""


class StagedDivision(NamedTuple):
    """Choice that a plan can write: rules for each stage, and a value of `offload`.

    Attributes:
        stages: the rules of each stage.
        offloading: index among the problem's offloadings.
    """

    stages: tuple[StageRules, ...]
    offloading: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedChoice:
    """Solution of a problem with stages; as :class:`~legoai.cost.search.memory.program.JointChoice`.

    Attributes:
        division: the choice; None where none fits.
        seconds: seconds of a step.
        bound: lower bound of the seconds of all choices that fit.
        status: `optimal`, `stopped` at a limit, or `infeasible`.
    """

    division: StagedDivision | None
    seconds: float
    bound: float
    status: Literal["optimal", "stopped", "infeasible"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedMemoryProblem:
    """Choice of the treatments of the blocks of all stages under the memory limits of the ranks.

    Attributes:
        ranks: the ranks, with their stages.
        graph: graph of the schedule's actions.
        actions: observed seconds of the actions of each stage, by kind.
        besides: observed seconds of a step outside the longest path through the actions.
        offloadings: seconds that each value of `offload` adds to a step.
        micro_batches: micro batches of a step.
    """

    ranks: Sequence[RankMemory]
    graph: ActionGraph
    actions: Sequence[Mapping[str, float]]
    besides: float
    offloadings: Sequence[float]
    micro_batches: int

    @property
    def stages(self) -> dict[Stage, StageBlocks]:
        """All stages by index."""
        return {stage.stage: stage for rank in self.ranks for stage in rank.stages}

    def options(self, division: StagedDivision) -> list[list[StageOption]]:
        """The options of the stages of each rank."""
        return [[stage.option(division.stages[stage.stage]) for stage in rank.stages] for rank in self.ranks]

    def time(self, division: StagedDivision) -> float:
        """Seconds of a step."""
        return self._follow(self.options(division), division.offloading)[0]

    def _follow(self, options: Sequence[Sequence[StageOption]], way: int) -> tuple[float, tuple[Path, ...]]:
        """Seconds of a step, and the longest path to the end of each rank."""
        seconds = [dict(found) for found in self.actions]
        besides = self.besides + self.offloadings[way]
        for rank, taken in zip(self.ranks, options, strict=True):
            for stage, one in zip(rank.stages, taken, strict=True):
                besides += one.besides
                for kind, more in one.seconds.items():
                    seconds[stage.stage][kind] += more
        longest, paths = self.graph.longest(seconds)
        return longest + besides, paths

    def excess(self, division: StagedDivision) -> float:
        """Bytes by which a choice exceeds the limit of a rank, at most over the ranks; at most 0 where all fit."""
        options = zip(self.ranks, self.options(division), strict=True)
        return max(rank.excess(taken, division.offloading) for rank, taken in options)

    def corrected(
        self, division: StagedDivision, active: Sequence[float], reserved: Sequence[float]
    ) -> StagedMemoryProblem:
        """The problem with its limits corrected by the error of the prediction for one choice.

        Args:
            division: the choice.
            active: simulated peak of active bytes of each rank.
            reserved: simulated bytes that the allocator of each rank reserves.
        """
        ranks = []
        seen = zip(self.ranks, self.options(division), active, reserved, strict=True)
        for rank, options, most_active, most_reserved in seen:
            most, unused = rank.taken(options, division.offloading)
            ranks.append(
                replace(
                    rank,
                    active=rank.active - (most_active - most),
                    reserved=rank.reserved - (most_reserved - most - unused),
                )
            )
        return replace(self, ranks=ranks)

    def greedy(self) -> StagedDivision | None:
        """A choice that fits, found by changing one block at a time; None where no change frees memory any more."""
        ways = range(len(self.offloadings))
        stages = self.stages
        fastest = {}
        for number, stage in stages.items():
            pair = min(stage.pairs, key=lambda pair: self._cost(stage.pairs[pair].seconds, stage.pairs[pair].besides))
            fastest[number] = StageRules((pair[0], pair[0], 0), (pair[1], pair[1], 0))
        way = min(ways, key=lambda way: self.offloadings[way])
        now: StagedDivision | None = StagedDivision(tuple(fastest[number] for number in sorted(fastest)), way)
        while now is not None and self._over(now) > 0.0:
            now = self._changed(now)
        return now

    def _changed(self, now: StagedDivision) -> StagedDivision | None:
        """The change that frees missing bytes at the least cost, as for blocks without stages."""
        steps = [(costs, one) for one, costs in self._steps(now)]
        over, held = self._over(now), self._held(now)
        return cheapest((costs, over - self._over(one), one) for costs, one in steps) or cheapest(
            (costs, held - self._held(one), one) for costs, one in steps if one.offloading == now.offloading
        )

    def _cost(self, seconds: Mapping[str, float], besides: float) -> float:
        """Seconds per step on one rank: those per micro batch of all kinds, and those outside the actions."""
        return self.micro_batches * sum(seconds.values()) + besides

    def _over(self, division: StagedDivision) -> float:
        """Sum over the ranks of the bytes beyond their limits."""
        options = zip(self.ranks, self.options(division), strict=True)
        return sum(max(rank.excess(taken, division.offloading), 0.0) for rank, taken in options)

    def _held(self, division: StagedDivision) -> float:
        """Bytes that the blocks hold at the peaks of their stages, as differences."""
        return sum(
            count * one.held
            for number, stage in self.stages.items()
            for one, count in stage.chain(division.stages[number])
        )

    def _steps(self, now: StagedDivision) -> Iterator[tuple[StagedDivision, float]]:
        """Yield changed choices with their costs in seconds.

        One more block holds less, on a rank that does not fit, or the offloading differs.
        """
        for rank, options in zip(self.ranks, self.options(now), strict=True):
            if rank.excess(options, now.offloading) <= 0.0:
                continue
            for stage, before in zip(rank.stages, options, strict=True):
                own = now.stages[stage.stage]
                changed = [own._replace(checkpoint=rule) for rule in one_more(own.checkpoint, stage.blocks)]
                changed += [own._replace(fsdp=rule) for rule in one_more(own.fsdp, stage.blocks)]
                for rules in changed:
                    if stage.known(rules):
                        others = (*now.stages[: stage.stage], rules, *now.stages[stage.stage + 1 :])
                        after = stage.option(rules)
                        costs = self._cost(after.seconds, after.besides) - self._cost(before.seconds, before.besides)
                        yield now._replace(stages=others), costs
        for way, seconds in enumerate(self.offloadings):
            if way != now.offloading:
                yield now._replace(offloading=way), seconds - self.offloadings[now.offloading]

    def solve(self) -> StagedChoice:
        """The choice of least time that fits.

        Raises:
            SolverMissingError: no solver is installed.
            SolverFailedError: the solver ended without an answer.
        """
        best, bound = self.greedy(), math.inf
        seconds = math.inf if best is None else self.time(best)
        for way in range(len(self.offloadings)):
            listed = [rank.listed(way) for rank in self.ranks]
            if not all(listed):
                continue
            found = self._solve(way, listed, seconds)
            bound = min(bound, found.bound)
            if found.division is not None and found.seconds < seconds:
                best, seconds = found.division, found.seconds
        bound = min(bound, seconds)
        if best is None:
            status: Literal["optimal", "stopped", "infeasible"] = "stopped" if math.isfinite(bound) else "infeasible"
        else:
            status = "optimal" if is_close(seconds, bound, 2 * PRECISION) else "stopped"
        return StagedChoice(division=best, seconds=seconds, bound=bound, status=status)

    def _solve(self, way: int, listed: Sequence[Sequence[tuple[StageOption, ...]]], known: float) -> StagedChoice:
        """The best choice under one value of `offload`; the search ends once its bound reaches the `known` seconds."""
        paths: dict[Path, None] = {}
        least = [min(options, key=lambda one: sum(map(sum, map(times_of, one)))) for options in listed]
        best, (seconds, found) = least, self._follow(least, way)
        paths |= dict.fromkeys(found)
        bound = -math.inf
        for _ in range(_MOST_ROUNDS):
            chosen, proved = _Program(self, way, listed, paths).solve(seconds)
            bound = max(bound, min(proved, seconds))
            if chosen is None or bound >= known or is_close(seconds, bound, PRECISION):
                break
            count = len(paths)
            taken, found = self._follow(chosen, way)
            paths |= dict.fromkeys(found)
            if taken < seconds:
                best, seconds = chosen, taken
            if len(paths) == count or is_close(seconds, bound, PRECISION):
                break
        rules = {one.stage: option.rules for rank, options in zip(self.ranks, best, strict=True)
                 for one, option in zip(rank.stages, options, strict=True)}  # fmt: skip
        division = StagedDivision(tuple(rules[number] for number in sorted(rules)), way)
        return StagedChoice(division=division, seconds=seconds, bound=bound, status="stopped")


class _Program:
    """Integer program over some paths, which selects one option per rank.

    Args:
        problem: the problem.
        way: index of the offloading.
        listed: the options of each rank.
        paths: paths that constrain the step time: none may be longer.
    """

    def __init__(
        self,
        problem: StagedMemoryProblem,
        way: int,
        listed: Sequence[Sequence[tuple[StageOption, ...]]],
        paths: Mapping[Path, None],
    ) -> None:
        self.listed = listed
        self.program = program = LinearProgram()
        self.besides = problem.besides + problem.offloadings[way]
        lengths = [path.seconds(problem.actions) for path in paths]
        self.scale = max([abs(length) for length in lengths] + [1e-12])
        self.time = program.variable(low=-math.inf if not lengths else -1e6, cost=1.0)
        self.taken = [
            [
                program.variable(high=1.0, integer=True, cost=sum(one.besides for one in options) / self.scale)
                for options in of_rank
            ]
            for of_rank in listed
        ]
        for variables in self.taken:
            program.equal(dict.fromkeys(variables, 1.0), 1.0)
        for path, length in zip(paths, lengths, strict=True):
            terms = {self.time: -1.0}
            for rank, of_rank, variables in zip(problem.ranks, listed, self.taken, strict=True):
                held = {stage.stage: place for place, stage in enumerate(rank.stages)}
                own = [(held[stage], kind, count) for (stage, kind), count in path.counts if stage in held]
                for options, variable in zip(of_rank, variables, strict=True):
                    more = sum(count * options[place].seconds.get(kind, 0.0) for place, kind, count in own)
                    terms[variable] = more / self.scale
            program.at_most(terms, -length / self.scale)

    def solve(self, most: float) -> tuple[list[tuple[StageOption, ...]] | None, float]:
        """The selected options and a lower bound of the time; no options where the node limit was reached first.

        Args:
            most: seconds of a known choice.
        """
        found = self.program.solve(node_limit=_MOST_NODES)
        if found.status == "infeasible":  # by the solver's rounding: every rank has an option
            return None, most
        bound = -math.inf if found.bound is None else found.bound * self.scale + self.besides
        if not found.values:
            return None, bound
        chosen = [
            options[max(range(len(options)), key=lambda place: found.values[variables[place]])]
            for options, variables in zip(self.listed, self.taken, strict=True)
        ]
        return chosen, bound
