"""Joint choice of what the blocks of each stage of a pipeline recompute and keep unsharded, as an integer program.

The blocks of a stage are a chain of pairs, as those of a model without stages are
(:mod:`legoai.cost.search.memory.program`), and each rank needs room at the points of its own step: in the backward of
each of its stages that finds most memory, with the micro batches that are under way there, and in the optimizer. What
stages share is the time of the step: the longest path through the schedule's actions
(:class:`~legoai.cost.search.stages.action_graph.ActionGraph`), with what the answer costs beside it.

So all that a rank could do and has room for is listed, but for what takes no less time than something else in every
kind of action. The program takes one of these for each rank, so that a step is shortest. There are too many paths to be
written down: the longest ones of each answer become rows until none is longer than the program's own objective. The
optimizer's state is offloaded on all ranks or on none, with a program for each.

A greedy choice is what it is compared with, and bounds it: from the fastest treatments on, one block after the other
gets that which frees the missing bytes at the least cost to its own rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

from legoai.cost.search.memory.program import one_more
from legoai.cost.search.memory.stage_blocks import RankMemory, Stage, StageBlocks, StageOption, StageRules, times_of
from legoai.cost.search.stages.action_graph import ActionGraph, Path
from legoai.runtime.linear_program import LinearProgram

_MOST_NODES: Final = 5000
"""Of each integer program; the same on every machine."""
_MOST_ROUNDS: Final = 100
"""Integer programs that are solved before the best answer so far is taken."""
_PRECISION: Final = 1e-6
"""Share of the time by which two answers may differ and count as equally fast: what the solver rounds."""


class StagedDivision(NamedTuple):
    """A choice that a plan can write.

    Attributes:
        stages: the rules of each.
        offloading: which way.
    """

    stages: tuple[StageRules, ...]
    offloading: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedChoice:
    """What was chosen; as :class:`~legoai.cost.search.memory.program.JointChoice`.

    Attributes:
        division: the choice; None where nothing fits.
        seconds: of a step.
        bound: no choice that fits takes less.
        status: `optimal`, `stopped` at a limit, or `infeasible`.
    """

    division: StagedDivision | None
    seconds: float
    bound: float
    status: Literal["optimal", "stopped", "infeasible"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedMemoryProblem:
    """Blocks of stages whose treatments are to be chosen.

    Attributes:
        ranks: with their stages.
        graph: of the schedule's actions.
        actions: seconds of the actions of each stage, by kind, as they were observed.
        besides: seconds of a step beside the longest path through them, as they were observed.
        offloadings: seconds that each way to offload adds to a step.
        micro_batches: of a step.
    """

    ranks: Sequence[RankMemory]
    graph: ActionGraph
    actions: Sequence[Mapping[str, float]]
    besides: float
    offloadings: Sequence[float]
    micro_batches: int

    @property
    def stages(self) -> dict[Stage, StageBlocks]:
        """Every stage."""
        return {stage.stage: stage for rank in self.ranks for stage in rank.stages}

    def options(self, division: StagedDivision) -> list[list[StageOption]]:
        """What the stages of each rank take."""
        return [[stage.option(division.stages[stage.stage]) for stage in rank.stages] for rank in self.ranks]

    def time(self, division: StagedDivision) -> float:
        """Seconds of a step."""
        return self._follow(self.options(division), division.offloading)[0]

    def _follow(self, options: Sequence[Sequence[StageOption]], way: int) -> tuple[float, tuple[Path, ...]]:
        """Seconds of a step, and the longest paths to the end of each rank."""
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
        """Bytes that a choice takes beyond the room of the fullest rank; at most 0 where all have it."""
        options = zip(self.ranks, self.options(division), strict=True)
        return max(rank.excess(taken, division.offloading) for rank, taken in options)

    def corrected(
        self, division: StagedDivision, active: Sequence[float], reserved: Sequence[float]
    ) -> StagedMemoryProblem:
        """The problem with less room, or more, by what a choice was observed to take beyond what was expected.

        Args:
            division: the choice.
            active: bytes that were active at the peak of each rank.
            reserved: bytes that the allocator of each rank reserved.
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
        """A choice that fits, found by one block after the other; None where it ends without one."""
        ways = range(len(self.offloadings))
        stages = self.stages
        fastest = {}
        for number, stage in stages.items():
            pair = min(stage.pairs, key=lambda pair: self._cost(stage.pairs[pair].seconds, stage.pairs[pair].besides))
            fastest[number] = StageRules((pair[0], pair[0], 0), (pair[1], pair[1], 0))
        way = min(ways, key=lambda way: self.offloadings[way])
        now = StagedDivision(tuple(fastest[number] for number in sorted(fastest)), way)
        while (over := self._over(now)) > 0.0:
            steps = []
            for one, costs in self._steps(now):
                freed = over - self._over(one)
                if freed > 0.0:
                    steps.append((costs / freed, one))
            if not steps:
                return None
            now = min(steps)[1]
        return now

    def _cost(self, seconds: Mapping[str, float], besides: float) -> float:
        """Seconds of a rank in a step."""
        return self.micro_batches * sum(seconds.values()) + besides

    def _over(self, division: StagedDivision) -> float:
        """Bytes that are missing on all ranks together."""
        options = zip(self.ranks, self.options(division), strict=True)
        return sum(max(rank.excess(taken, division.offloading), 0.0) for rank, taken in options)

    def _steps(self, now: StagedDivision) -> Iterator[tuple[StagedDivision, float]]:
        """Choices in which one block more holds less on a rank without room, or more is offloaded, with their costs."""
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
            SolverFailedError: it ended without an answer.
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
            status = "optimal" if _close(seconds, bound, 2 * _PRECISION) else "stopped"
        return StagedChoice(division=best, seconds=seconds, bound=bound, status=status)

    def _solve(self, way: int, listed: Sequence[Sequence[tuple[StageOption, ...]]], known: float) -> StagedChoice:
        """The best choice with one way to offload, or none where its bound is no less than what is known."""
        paths: dict[Path, None] = {}
        least = [min(options, key=lambda one: sum(map(sum, map(times_of, one)))) for options in listed]
        best, (seconds, found) = least, self._follow(least, way)
        paths |= dict.fromkeys(found)
        bound = -math.inf
        for _ in range(_MOST_ROUNDS):
            chosen, proved = _Program(self, way, listed, paths).solve(seconds)
            bound = max(bound, min(proved, seconds))
            if chosen is None or bound >= known or _close(seconds, bound, _PRECISION):
                break
            count = len(paths)
            taken, found = self._follow(chosen, way)
            paths |= dict.fromkeys(found)
            if taken < seconds:
                best, seconds = chosen, taken
            if len(paths) == count or _close(seconds, bound, _PRECISION):
                break
        rules = {one.stage: option.rules for rank, options in zip(self.ranks, best, strict=True)
                 for one, option in zip(rank.stages, options, strict=True)}  # fmt: skip
        division = StagedDivision(tuple(rules[number] for number in sorted(rules)), way)
        return StagedChoice(division=division, seconds=seconds, bound=bound, status="stopped")


def _close(seconds: float, bound: float, gap: float) -> bool:
    return math.isfinite(seconds) and seconds - bound <= gap * abs(seconds)


class _Program:
    """The integer program of some paths: one of its options for each rank.

    Args:
        problem: whose stages are treated.
        way: to offload.
        listed: the options of each rank.
        paths: of which each takes at most the time of a step.
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
        """The options of the ranks and a bound of the time; none where the limit was reached first.

        Args:
            most: seconds of a choice that is known.
        """
        found = self.program.solve(node_limit=_MOST_NODES)
        if found.status == "infeasible":  # what is rounded
            return None, most
        bound = -math.inf if found.bound is None else found.bound * self.scale + self.besides
        if not found.values:
            return None, bound
        chosen = [
            options[max(range(len(options)), key=lambda place: found.values[variables[place]])]
            for options, variables in zip(self.listed, self.taken, strict=True)
        ]
        return chosen, bound
