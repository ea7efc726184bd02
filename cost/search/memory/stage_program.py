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

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from legoai.cost.search.memory.program import Offloading, Pair, Rule, chain, one_more
from legoai.cost.search.stages.action_graph import ActionGraph, Path
from legoai.runtime.linear_program import LinearProgram

_MOST_NODES: Final = 5000
"""Of each integer program; the same on every machine."""
_MOST_ROUNDS: Final = 100
"""Integer programs that are solved before the best answer so far is taken."""
_PRECISION: Final = 1e-6
"""Share of the time by which two answers may differ and count as equally fast: what the solver rounds."""

Stage: TypeAlias = int
_Array: TypeAlias = "np.ndarray[Any, Any]"


class StageRules(NamedTuple):
    """How the blocks of a stage are treated."""

    checkpoint: Rule
    fsdp: Rule


class StagedDivision(NamedTuple):
    """A choice that a plan can write.

    Attributes:
        stages: the rules of each.
        offloading: which way.
    """

    stages: tuple[StageRules, ...]
    offloading: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePair:
    """What blocks of a pair take in a stage.

    Attributes:
        seconds: of a block for a micro batch by kind of action, above those of a block of some other pair.
        besides: seconds of a block in a step beside the actions, above those of a block of that pair.
        held: bytes of a block when the stage's backward finds most, above those of a block of that pair.
        stays: bytes behind its backward, likewise above what that pair holds before it.
        peak: active bytes up to the backward of the last block if all blocks of the stage are of this pair, and those
            of the rank's other stages of that pair.
        inside: likewise in the backward of the last block as it would be if it were one of the others.
        beside: bytes of a block when another stage's backward finds most, likewise above that pair, by that stage.
        elsewhere: bytes of a block in other actions, likewise.
        optimizer: bytes of a block while the optimizer runs, likewise.
        unused: bytes that the allocator reserves beyond what is active.
    """

    seconds: Mapping[str, float]
    besides: float = 0.0
    held: float = 0.0
    stays: float = 0.0
    peak: float = 0.0
    inside: float = 0.0
    beside: Mapping[Stage, float] = field(default_factory=dict)
    elsewhere: float = 0.0
    optimizer: float = 0.0
    unused: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBlocks:
    """The blocks of a stage.

    Attributes:
        stage: which.
        blocks: their number.
        pairs: what each pair takes; pairs that are missing are not chosen.
    """

    stage: Stage
    blocks: int
    pairs: Mapping[Pair, StagePair]

    def chain(self, rules: StageRules) -> list[tuple[StagePair, int]]:
        """What blocks take in the model's order under some rules, with their numbers."""
        return [(self.pairs[pair], count) for pair, count in chain(*rules, self.blocks)]

    def known(self, rules: StageRules) -> bool:
        """Whether all pairs are there of which blocks would be."""
        return all(pair in self.pairs for pair, _ in chain(*rules, self.blocks))

    def rules(self) -> Iterator[StageRules]:
        """All rules that a plan can write, with what holds less in front."""
        kinds = [sorted({pair[place] for pair in self.pairs}) for place in (0, 1)]
        lists: list[list[Rule]] = [
            [(one, one, 0) for one in known]
            + [(*two, some) for two in itertools.combinations(known, 2) for some in range(1, self.blocks)]
            for known in kinds
        ]
        every = (StageRules(*two) for two in itertools.product(*lists))
        return (rules for rules in every if self.known(rules))

    def option(self, rules: StageRules) -> StageOption:
        """What the stage takes under some rules."""
        found = self.chain(rules)
        kinds = sorted({kind for one, _ in found for kind in one.seconds})
        moments = sorted({moment for one, _ in found for moment in one.beside})
        return StageOption(
            rules=rules,
            seconds={kind: sum(count * one.seconds.get(kind, 0.0) for one, count in found) for kind in kinds},
            besides=sum(count * one.besides for one, count in found),
            own=max(self._needed(found)),
            beside={moment: sum(count * one.beside.get(moment, 0.0) for one, count in found) for moment in moments},
            elsewhere=sum(count * one.elsewhere for one, count in found),
            optimizer=sum(count * one.optimizer for one, count in found),
            unused=max(one.unused for one, _ in found),
        )

    def _needed(self, found: Sequence[tuple[StagePair, int]]) -> Iterator[float]:
        """Bytes in the stage's own backward: at the turn, and in the first and the last block of each pair.

        The last block of all is at the turn. Where parameters stay gathered, memory grows from block to block.
        """
        last = found[-1][0]
        yield last.peak + sum(count * (one.held - last.held) for one, count in found)
        for place, (own, count) in enumerate(found):
            before = sum(number * (one.held - own.held) for one, number in found[:place])
            behind = sum(number * (one.stays - own.held) for one, number in found[place + 1 :])
            ends = {0, count - 1} if place < len(found) - 1 else {0, count - 2} if count > 1 else set()
            for end in ends:
                yield own.inside + before + behind + (count - 1 - end) * (own.stays - own.held)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOption:
    """What a stage takes under some rules.

    Attributes:
        rules: of its blocks.
        seconds: for a micro batch by kind of action, above those that it was seen to take.
        besides: seconds of a step beside the actions, likewise.
        own: bytes in its own backward, if the rank's other stages are as they were seen.
        beside: bytes in that of another stage, above those that it was seen to take.
        elsewhere: likewise in other actions.
        optimizer: likewise in the optimizer.
        unused: bytes that the allocator reserves beyond what is active.
    """

    rules: StageRules
    seconds: Mapping[str, float]
    besides: float
    own: float
    beside: Mapping[Stage, float]
    elsewhere: float
    optimizer: float
    unused: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The stages of a rank, and its room.

    Attributes:
        stages: that it holds.
        elsewhere: bytes in other actions as they were seen; 0 where these matter nowhere.
        optimizer: bytes in the optimizer as they were seen.
        offloadings: bytes of each way to offload; its seconds are told of the step.
        active: bytes of active memory that the rank may have.
        reserved: bytes that its allocator may reserve.
    """

    stages: Sequence[StageBlocks]
    elsewhere: float
    optimizer: float
    offloadings: Sequence[Offloading]
    active: float
    reserved: float

    def taken(self, options: Sequence[StageOption], way: int) -> tuple[float, float]:
        """Bytes that are active where most are, and those that the allocator reserves beyond them."""
        offloading = self.offloadings[way]
        needed = [self.optimizer + sum(one.optimizer for one in options) + offloading.optimizer]
        for own, stage in zip(options, self.stages, strict=True):
            others = sum(other.beside.get(stage.stage, 0.0) for other in options if other is not own)
            needed.append(own.own + others + offloading.bytes)
        if self.elsewhere:
            needed.append(self.elsewhere + sum(one.elsewhere for one in options) + offloading.bytes)
        return max(needed), max(offloading.unused, *(one.unused for one in options))

    def excess(self, options: Sequence[StageOption], way: int) -> float:
        """Bytes beyond the room; at most 0 where the rank has it."""
        most, unused = self.taken(options, way)
        return max(most - self.active, most + unused - self.reserved)

    def listed(self, way: int) -> list[tuple[StageOption, ...]]:
        """What the rank could do and has room for, without what takes no less time than something else in any action.

        A stage's options are left out before they are joined where another takes no more of anything.
        """
        sized = len(self.stages) > 1
        each = [_best([stage.option(rules) for rules in stage.rules()], sized=sized) for stage in self.stages]
        fitting = [options for options in itertools.product(*each) if self.excess(options, way) <= 0.0]
        rows = [[value for one in options for value in _times(one)] for options in fitting]
        return [fitting[place] for place in _front(rows)]


def _times(option: StageOption) -> list[float]:
    return [*option.seconds.values(), option.besides]


def _best(options: list[StageOption], *, sized: bool) -> list[StageOption]:
    """Options than which none takes less of everything; all of them unless their bytes are to be joined with others."""
    if not sized:
        return options
    rows = [
        [*_times(one), one.own, *one.beside.values(), one.elsewhere, one.optimizer, one.unused] for one in options
    ]  # fmt: skip
    return [options[place] for place in _front(rows)]


def _front(rows: Sequence[Sequence[float]]) -> list[int]:
    """The rows than which no other is at most as large everywhere; of equal ones the first."""
    if not rows:
        return []
    values = np.asarray(rows, dtype=np.float64)
    kept: list[int] = []
    held = np.empty_like(values)
    # What comes later in this order is nowhere less than what comes before.
    for place in np.lexsort((np.arange(len(values)), values.sum(axis=1))):
        if not kept or not bool(np.any(np.all(held[: len(kept)] <= values[place], axis=1))):
            held[len(kept)] = values[place]
            kept.append(int(place))
    return sorted(kept)


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
        actions: seconds of the actions of each stage, by kind, as they were seen.
        besides: seconds of a step beside the longest path through them, as they were seen.
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
        """The problem with less room, or more, by what a choice was seen to take beyond what was expected.

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
        least = [min(options, key=lambda one: sum(map(sum, map(_times, one)))) for options in listed]
        best, (seconds, found) = least, self._follow(least, way)
        paths |= dict.fromkeys(found)
        bound = -math.inf
        for _ in range(_MOST_ROUNDS):
            chosen, told = _Program(self, way, listed, paths).solve(seconds)
            bound = max(bound, min(told, seconds))
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
