"""Contiguous assignment of blocks to the stages of a pipeline: least step time, within each rank's memory limit.

An integer program decides how many blocks of each group of equal consecutive blocks a stage has. Its objective is the
longest path through the schedule's actions (:class:`~legoai.cost.search.stages.action_graph.ActionGraph`). There are
too many paths to write them all down, so rows are added as needed: the longest paths of each solution become rows,
which are valid for every split. When no path of a solution is longer than the objective, the solution is optimal.
Until then, the objective is a lower bound of the step time of every split.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Final, Literal

from legoai.cost.search.stages.action_graph import ActionGraph, Path
from legoai.runtime.linear_program import LinearProgram

_MOST_ROUNDS: Final = 200
"""Limit of solved integer programs, times the number of stages; after it the best split so far is returned."""
_MOST_NODES: Final = 500
"""Node limit of each integer program, which does not depend on the machine as a time limit would."""
_MOST_MOVES: Final = 12
"""Limit of the moves of the warm start."""
_MOVED: Final = 3
"""Stages that a move may take a block from, and stages that it may give it to."""
PRECISION: Final = 1e-6
"""Relative difference up to which two step times count as equal: the solver's rounding."""


@dataclass(frozen=True, slots=True)
class Block:
    """Costs of a block of the model, or of the modules before the first or after the last block.

    Attributes:
        seconds: seconds per micro batch, by kind of action.
        whole: seconds of forward and backward per micro batch; more than the sum of `seconds` where the division of a
            split backward into halves is not known.
        state: bytes that do not depend on the schedule, such as parameters and optimizer state.
        kept: bytes of activations per micro batch, from its forward to its backward.
        halved: further bytes per micro batch between the halves of its backward.
        gradients: bytes of accumulated gradients.
        parameters: bytes of unsharded parameters.
    """

    seconds: Mapping[str, float] = field(hash=False)
    whole: float = 0.0
    state: float = 0.0
    kept: float = 0.0
    gradients: float = 0.0
    parameters: float = 0.0
    halved: float = 0.0

    def taken(self, stage: int, moment: Moment) -> float:
        """Bytes at a moment, if the block is in a stage."""
        summed = self.gradients if stage in moment.summed else 0.0
        gathered = self.parameters if stage in moment.gathered else 0.0
        halved = moment.halved.get(stage, 0) * self.halved
        return self.state + moment.held.get(stage, 0.0) * self.kept + halved + summed + gathered


@dataclass(frozen=True, slots=True)
class Moment:
    """Memory state of a rank at one moment of a step, and its limit.

    Attributes:
        held: factor of `Block.kept` for each of its stages, such as the micro batches in flight.
        room: memory limit, in bytes.
        summed: stages with accumulated gradients.
        gathered: stages with unsharded parameters.
        besides: bytes that do not depend on the split.
        halved: micro batches between the halves of their backward, for each of its stages.
    """

    held: Mapping[int, float]
    room: float
    summed: frozenset[int] = frozenset()
    gathered: frozenset[int] = frozenset()
    besides: float = 0.0
    halved: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The best split found.

    Attributes:
        counts: number of blocks of each stage; empty where no split fits.
        seconds: seconds of a step; infinite where no split fits.
        bound: lower bound of the seconds of all splits that fit.
    """

    counts: tuple[int, ...]
    seconds: float
    bound: float

    @property
    def status(self) -> Literal["optimal", "stopped", "infeasible"]:
        """Whether the split is proven optimal, or no split fits."""
        if not self.counts:
            return "stopped" if math.isfinite(self.bound) else "infeasible"
        return "optimal" if is_close(self.seconds, self.bound, 2 * PRECISION) else "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProblem:
    """Assignment of blocks to stages, and of stages to ranks with memory limits.

    Attributes:
        blocks: blocks in the model's order; each stage gets at least one.
        first: modules before the first block, which the first stage has too.
        last: modules after the last block, which the last stage has too.
        ranks: the stages of each rank.
        moments: for each rank, the moments at which its memory limit must hold.
        graph: graph of the schedule's actions.
        micro_batches: micro batches of a step.
    """

    blocks: Sequence[Block]
    first: Block
    last: Block
    ranks: Sequence[Sequence[int]]
    moments: Sequence[Sequence[Moment]]
    graph: ActionGraph
    micro_batches: int

    @property
    def stages(self) -> int:
        """Number of stages."""
        return sum(map(len, self.ranks))

    def time(self, counts: Sequence[int]) -> float:
        """Lower bound of the step time of a split: the longest path, or the computation of the busiest rank."""
        return self._follow(counts, {})

    def fits(self, counts: Sequence[int]) -> bool:
        """Whether a split is within the memory limit of every rank at every moment."""
        return all(needed <= moment.room for moment, needed in self._needed(counts))

    def memory(self, counts: Sequence[int]) -> float:
        """Lower bound of the peak memory of a split, in bytes, on the rank with the highest peak."""
        return max((needed for _, needed in self._needed(counts)), default=0.0)

    def _needed(self, counts: Sequence[int]) -> Iterator[tuple[Moment, float]]:
        """Yield every moment of every rank, with the bytes at that moment."""
        held = self._blocks(counts)
        for stages, moments in zip(self.ranks, self.moments, strict=True):
            for moment in moments:
                blocks = sum(block.taken(stage, moment) for stage in stages for block in held[stage])
                yield moment, moment.besides + blocks

    def even(self) -> tuple[int, ...]:
        """Equal numbers of blocks; the remainder goes to the last stages."""
        least, more = divmod(len(self.blocks), self.stages)
        return tuple(least + (stage >= self.stages - more) for stage in range(self.stages))

    def solve(self, *, gap: float = PRECISION) -> Assignment:
        """The split with the least step time.

        Args:
            gap: relative gap to the bound at which a split is accepted.

        Raises:
            SolverMissingError: no solver is installed.
            SolverFailedError: the solver ended without an answer.
        """
        assert self.stages <= len(self.blocks)
        paths: dict[Path, None] = {}
        best, seconds = self._by_moves(paths)
        bound = 0.0
        for _ in range(max(4, _MOST_ROUNDS // self.stages)):
            answer = _Program(self, paths).solve(_MOST_NODES)
            if answer is None:
                return Assignment(counts=best, seconds=seconds, bound=seconds)
            bound = max(bound, min(answer.bound, seconds))
            if not answer.counts or is_close(seconds, bound, gap):
                break
            known = len(paths)
            taken = self._follow(answer.counts, paths)
            if taken < seconds and self.fits(answer.counts):
                best, seconds = answer.counts, taken
            if len(paths) == known or is_close(seconds, bound, gap):
                break
        return Assignment(counts=best, seconds=seconds, bound=bound)

    def _follow(self, counts: Sequence[int], paths: dict[Path, None]) -> float:
        """The seconds of a split; its longest paths are added to `paths`."""
        longest, found = self.graph.longest(self._seconds(counts))
        paths |= dict.fromkeys(found)
        return max(longest, self._busiest(counts))

    def _by_moves(self, paths: dict[Path, None]) -> tuple[tuple[int, ...], float]:
        """Warm start by local search from an even split: the best split found that fits, and its seconds.

        Each move takes a block from one of the stages with the most seconds on the longest path, and gives it to one of
        those with the fewest.
        """
        counts = self.even()
        seconds = self._follow(counts, paths)
        best = (counts, seconds) if self.fits(counts) else ((), math.inf)
        for _ in range(_MOST_MOVES):
            _, [path, *_] = self.graph.longest(self._seconds(counts))
            weight = dict.fromkeys(range(self.stages), 0.0)
            for (stage, kind), count in path.counts:
                weight[stage] += count * self.blocks[0].seconds.get(kind, 0.0)
            ordered = sorted(weight, key=lambda stage: (-weight[stage], stage))
            tried = [
                tuple(count + (stage == to) - (stage == off) for stage, count in enumerate(counts))
                for off in ordered[:_MOVED]
                for to in ordered[-_MOVED:]
                if off != to and counts[off] > 1
            ]
            taken = [(self._follow(one, paths), one) for one in tried]
            for one in taken:
                if one[0] < best[1] and self.fits(one[1]):
                    best = one[1], one[0]
            if not taken or min(taken)[0] >= seconds:
                break
            seconds, counts = min(taken)
        return best

    def _blocks(self, counts: Sequence[int]) -> list[list[Block]]:
        """The blocks of each stage, with the modules before and after all blocks."""
        ends = list(accumulate(counts))
        held = [list(self.blocks[end - count : end]) for end, count in zip(ends, counts, strict=True)]
        held[0].append(self.first)
        held[-1].append(self.last)
        return held

    def _seconds(self, counts: Sequence[int]) -> list[Mapping[str, float]]:
        found: list[Mapping[str, float]] = []
        for blocks in self._blocks(counts):
            of_stage: defaultdict[str, float] = defaultdict(float)
            for block in blocks:
                for kind, seconds in block.seconds.items():
                    of_stage[kind] += seconds
            found.append(of_stage)
        return found

    def _busiest(self, counts: Sequence[int]) -> float:
        """Seconds of computation of the busiest rank."""
        whole = [sum(block.whole for block in blocks) for blocks in self._blocks(counts)]
        return self.micro_batches * max(sum(whole[stage] for stage in held) for held in self.ranks)


def is_close(seconds: float, bound: float, gap: float) -> bool:
    """Whether the time of a solution is within a share of its lower bound."""
    return math.isfinite(seconds) and seconds - bound <= gap * abs(seconds)


@dataclass(frozen=True, slots=True)
class _Answer:
    counts: tuple[int, ...]
    bound: float


class _Program:
    """Integer program over some paths.

    A variable is the number of blocks of one group of equal consecutive blocks that a stage has. It may be positive
    only if this stage and earlier ones have all blocks of the previous group.

    Args:
        problem: the problem.
        paths: paths that constrain the step time: none may be longer.
    """

    def __init__(self, problem: StageProblem, paths: Mapping[Path, None]) -> None:
        self.problem = problem
        self.groups = [(block, len(list(same))) for block, same in groupby(problem.blocks)]
        self.program = LinearProgram()
        self.scale = max(problem.time(problem.even()), 1e-12)
        self.time = self.program.variable(cost=1.0)
        stages = range(problem.stages)
        self.taken = [
            [self.program.variable(high=count, integer=True) for _, count in self.groups] for _ in stages
        ]  # fmt: skip
        for place, (_, count) in enumerate(self.groups):
            self.program.equal({self.taken[stage][place]: 1.0 for stage in stages}, count)
        for stage in stages:
            self.program.at_most(dict.fromkeys(self.taken[stage], -1.0), -1.0)
        self._in_order()
        for path in paths:
            self._at_least({key: float(count) for key, count in path.counts})
        for held, moments in zip(problem.ranks, problem.moments, strict=True):
            self._at_least({(stage, ""): float(problem.micro_batches) for stage in held})
            self._fit(held, moments)

    def _in_order(self) -> None:
        for place, (_, count) in enumerate(self.groups[:-1]):
            following, most = place + 1, self.groups[place + 1][1]
            before: dict[int, float] = {}
            for stage in range(self.problem.stages):
                before[self.taken[stage][place]] = -1.0
                over = self.program.variable(high=1.0, integer=True)
                self.program.at_most({**before, over: float(count)}, 0.0)
                self.program.at_most({self.taken[stage][following]: 1.0, over: -float(most)}, 0.0)

    def _at_least(self, counts: Mapping[tuple[int, str], float]) -> None:
        """Add a row: the step time is at least that of some actions; kind `""` is a micro batch's whole computation."""
        terms: defaultdict[int, float] = defaultdict(float)
        side = 0.0
        for (stage, kind), count in counts.items():
            for place, (block, _) in enumerate(self.groups):
                terms[self.taken[stage][place]] += count * _of(block, kind) / self.scale
            if stage == 0:
                side += count * _of(self.problem.first, kind) / self.scale
            if stage == self.problem.stages - 1:
                side += count * _of(self.problem.last, kind) / self.scale
        self.program.at_most({**terms, self.time: -1.0}, -side)

    def _fit(self, held: Sequence[int], moments: Sequence[Moment]) -> None:
        """Add rows: at each moment a rank's blocks are within its memory limit."""
        problem = self.problem
        for moment in moments:
            terms, room = {}, moment.room - moment.besides
            if math.isinf(room):
                continue
            size = max(abs(room), 1.0)
            for stage in held:
                for place, (block, _) in enumerate(self.groups):
                    terms[self.taken[stage][place]] = block.taken(stage, moment) / size
                if stage == 0:
                    room -= problem.first.taken(stage, moment)
                if stage == problem.stages - 1:
                    room -= problem.last.taken(stage, moment)
            self.program.at_most(terms, room / size)

    def solve(self, node_limit: int) -> _Answer | None:
        """The counts and a lower bound of the time; no counts at the node limit, None if no split fits."""
        found = self.program.solve(node_limit=node_limit)
        if found.status == "infeasible":
            return None
        bound = (found.bound or 0.0) * self.scale
        if not found.values:
            return _Answer((), bound)
        return _Answer(tuple(round(sum(found.values[one] for one in taken)) for taken in self.taken), bound)


def _of(block: Block, kind: str) -> float:
    return block.seconds.get(kind, 0.0) if kind else block.whole
