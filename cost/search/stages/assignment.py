"""Contiguous assignment of blocks to the stages of a pipeline: least time of a step, within each rank's memory.

An integer program decides how many blocks of each run of equal ones a stage has. Its objective is the longest path
through the schedule's actions (:class:`~legoai.cost.search.stages.action_graph.ActionGraph`). There are too many paths
to be written down, so rows are added as they are needed: the program's answer is laid through the graph, and the
longest path found there, which holds for every split, becomes a row. When no path is longer than the program's own
objective, it is the least of all splits. On the way the objective is a lower bound of every split.
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
"""Integer programs that are solved before the best split so far is the answer, times the number of stages."""
_MOST_NODES: Final = 500
"""Nodes of each of them; the same on every machine."""
_MOST_MOVES: Final = 12
_MOVED: Final = 3
"""Moves of one block before the first of them, and the stages among which each is chosen."""
_PRECISION: Final = 1e-6
"""Share of the time by which two splits may differ and count as equally fast: what the solver rounds."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of the model, or what stands before or behind all of them.

    Attributes:
        seconds: of one micro batch, by kind of action.
        whole: seconds of one micro batch's forward and backward, which may be more than those of its actions add up to
            where it is not known how a backward is divided.
        state: bytes that it takes on its rank whatever the schedule.
        kept: bytes that it keeps of one micro batch from its forward to its backward.
        halved: bytes that it has of one micro batch between the halves of its backward beside these.
        gradients: bytes that it takes while its gradients are added up over micro batches.
        parameters: bytes that it takes while its stage is gathered.
    """

    seconds: Mapping[str, float] = field(hash=False)
    whole: float = 0.0
    state: float = 0.0
    kept: float = 0.0
    gradients: float = 0.0
    parameters: float = 0.0
    halved: float = 0.0

    def taken(self, stage: int, moment: Moment) -> float:
        """Bytes that it takes at a moment, in a stage."""
        summed = self.gradients if stage in moment.summed else 0.0
        gathered = self.parameters if stage in moment.gathered else 0.0
        halved = moment.halved.get(stage, 0) * self.halved
        return self.state + moment.held.get(stage, 0.0) * self.kept + halved + summed + gathered


@dataclass(frozen=True, slots=True)
class Moment:
    """What a rank holds at one moment of a step.

    Attributes:
        held: of each of its stages, how often what a block keeps is held.
        room: bytes that its blocks may take.
        summed: the stages whose gradients are there.
        gathered: the stages whose parameters are unsharded.
        besides: bytes that are there whatever the split is.
        halved: of each of its stages, micro batches between the halves of their backward.
    """

    held: Mapping[int, float]
    room: float
    summed: frozenset[int] = frozenset()
    gathered: frozenset[int] = frozenset()
    besides: float = 0.0
    halved: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The best split that was found.

    Attributes:
        counts: blocks of each stage; empty where no split fits.
        seconds: of a step; infinite where no split fits.
        bound: no split that fits takes less.
    """

    counts: tuple[int, ...]
    seconds: float
    bound: float

    @property
    def status(self) -> Literal["optimal", "stopped", "infeasible"]:
        """Whether it is the best of all."""
        if not self.counts:
            return "stopped" if math.isfinite(self.bound) else "infeasible"
        return "optimal" if _close(self.seconds, self.bound, 2 * _PRECISION) else "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProblem:
    """Blocks that are to be assigned, and the ranks on which their stages lie.

    Attributes:
        blocks: in the model's order; each stage gets at least one.
        first: what the first stage has besides.
        last: what the last stage has besides.
        ranks: the stages of each.
        moments: of each rank, at which its memory must suffice.
        graph: of the schedule's actions.
        micro_batches: of a step.
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
        """Their number."""
        return sum(map(len, self.ranks))

    def time(self, counts: Sequence[int]) -> float:
        """Seconds of a step of a split, at least: the longest path, or the sum of what a rank computes."""
        return self._follow(counts, {})

    def fits(self, counts: Sequence[int]) -> bool:
        """Whether a split fits on every rank at every moment."""
        return all(needed <= moment.room for moment, needed in self._needed(counts))

    def memory(self, counts: Sequence[int]) -> float:
        """Bytes that a split takes on the fullest rank, at least."""
        return max((needed for _, needed in self._needed(counts)), default=0.0)

    def _needed(self, counts: Sequence[int]) -> Iterator[tuple[Moment, float]]:
        """Every moment of every rank, with the bytes that are held there."""
        held = self._blocks(counts)
        for stages, moments in zip(self.ranks, self.moments, strict=True):
            for moment in moments:
                blocks = sum(block.taken(stage, moment) for stage in stages for block in held[stage])
                yield moment, moment.besides + blocks

    def even(self) -> tuple[int, ...]:
        """Equal numbers of blocks, the later stages one more."""
        least, more = divmod(len(self.blocks), self.stages)
        return tuple(least + (stage >= self.stages - more) for stage in range(self.stages))

    def solve(self, *, gap: float = _PRECISION) -> Assignment:
        """The split of least time.

        Args:
            gap: share of the time by which the answer may be above the bound.

        Raises:
            SolverMissingError: no solver is installed.
            SolverFailedError: it ended without an answer.
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
            if not answer.counts or _close(seconds, bound, gap):
                break
            known = len(paths)
            taken = self._follow(answer.counts, paths)
            if taken < seconds and self.fits(answer.counts):
                best, seconds = answer.counts, taken
            if len(paths) == known or _close(seconds, bound, gap):
                break
        return Assignment(counts=best, seconds=seconds, bound=bound)

    def _follow(self, counts: Sequence[int], paths: dict[Path, None]) -> float:
        """The seconds of a split, whose longest paths are noted."""
        longest, found = self.graph.longest(self._seconds(counts))
        paths |= dict.fromkeys(found)
        return max(longest, self._busiest(counts))

    def _by_moves(self, paths: dict[Path, None]) -> tuple[tuple[int, ...], float]:
        """A split from which no move of one block off the longest path is faster, and its seconds; the warm start.

        From an even split on, a block goes from one of the stages that are on the longest path most to one of those
        that are on it least.
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
        """The blocks of each stage, and what the ends have besides."""
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
        """Seconds that the busiest rank computes."""
        whole = [sum(block.whole for block in blocks) for blocks in self._blocks(counts)]
        return self.micro_batches * max(sum(whole[stage] for stage in held) for held in self.ranks)


def _close(seconds: float, bound: float, gap: float) -> bool:
    return math.isfinite(seconds) and seconds - bound <= gap * seconds


@dataclass(frozen=True, slots=True)
class _Answer:
    counts: tuple[int, ...]
    bound: float


class _Program:
    """The integer program of some paths.

    Of each run of equal blocks a stage takes a whole number. It takes of a run only where the earlier stages and itself
    have taken all of the run before it.

    Args:
        problem: whose blocks are assigned.
        paths: of which each takes at most the time of a step.
    """

    def __init__(self, problem: StageProblem, paths: Mapping[Path, None]) -> None:
        self.problem = problem
        self.runs = [(block, len(list(same))) for block, same in groupby(problem.blocks)]
        self.program = LinearProgram()
        self.scale = max(problem.time(problem.even()), 1e-12)
        self.time = self.program.variable(cost=1.0)
        stages = range(problem.stages)
        self.taken = [
            [self.program.variable(high=count, integer=True) for _, count in self.runs] for _ in stages
        ]  # fmt: skip
        for place, (_, count) in enumerate(self.runs):
            self.program.equal({self.taken[stage][place]: 1.0 for stage in stages}, count)
        for stage in stages:
            self.program.at_most(dict.fromkeys(self.taken[stage], -1.0), -1.0)
        self._in_order()
        for path in paths:
            self._longer_than({key: float(count) for key, count in path.counts})
        for held, moments in zip(problem.ranks, problem.moments, strict=True):
            self._longer_than({(stage, ""): float(problem.micro_batches) for stage in held})
            self._fit(held, moments)

    def _in_order(self) -> None:
        for place, (_, count) in enumerate(self.runs[:-1]):
            behind, most = place + 1, self.runs[place + 1][1]
            before: dict[int, float] = {}
            for stage in range(self.problem.stages):
                before[self.taken[stage][place]] = -1.0
                over = self.program.variable(high=1.0, integer=True)
                self.program.at_most({**before, over: float(count)}, 0.0)
                self.program.at_most({self.taken[stage][behind]: 1.0, over: -float(most)}, 0.0)

    def _longer_than(self, counts: Mapping[tuple[int, str], float]) -> None:
        """A row: a step takes no less than some actions of some stages; of kind `""` is the whole of a micro batch."""
        terms: defaultdict[int, float] = defaultdict(float)
        side = 0.0
        for (stage, kind), count in counts.items():
            for place, (block, _) in enumerate(self.runs):
                terms[self.taken[stage][place]] += count * _of(block, kind) / self.scale
            if stage == 0:
                side += count * _of(self.problem.first, kind) / self.scale
            if stage == self.problem.stages - 1:
                side += count * _of(self.problem.last, kind) / self.scale
        self.program.at_most({**terms, self.time: -1.0}, -side)

    def _fit(self, held: Sequence[int], moments: Sequence[Moment]) -> None:
        """Rows: at each of its moments a rank has room for its blocks."""
        problem = self.problem
        for moment in moments:
            terms, room = {}, moment.room - moment.besides
            if math.isinf(room):
                continue
            size = max(abs(room), 1.0)
            for stage in held:
                for place, (block, _) in enumerate(self.runs):
                    terms[self.taken[stage][place]] = block.taken(stage, moment) / size
                if stage == 0:
                    room -= problem.first.taken(stage, moment)
                if stage == problem.stages - 1:
                    room -= problem.last.taken(stage, moment)
            self.program.at_most(terms, room / size)

    def solve(self, node_limit: int) -> _Answer | None:
        """The counts and a bound of the time; no counts where the limit was reached first, None if nothing fits."""
        found = self.program.solve(node_limit=node_limit)
        if found.status == "infeasible":
            return None
        bound = (found.bound or 0.0) * self.scale
        if not found.values:
            return _Answer((), bound)
        return _Answer(tuple(round(sum(found.values[one] for one in taken)) for taken in self.taken), bound)


def _of(block: Block, kind: str) -> float:
    return block.seconds.get(kind, 0.0) if kind else block.whole


def splits(blocks: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Every contiguous split: the numbers of blocks of the stages."""
    if stages == 1:
        yield (blocks,)
        return
    for first in range(1, blocks - stages + 2):
        for rest in splits(blocks - first, stages - 1):
            yield (first, *rest)
