"""Joint choice of what equal blocks recompute, what they keep unsharded, and what is offloaded, as an integer program.

A block has one of the treatments of `checkpoint` and one of `fsdp`: a pair. Blocks are equal, so that it matters only
how many have each pair, and in which order: what holds more stands behind, where backward comes first, so that it is
freed before what holds less needs room to recompute. A rule divides its blocks in two at most. So the blocks of a plan
are a chain of pairs, in which both treatments ascend in the bytes that they hold.

The program counts the blocks of each pair. It minimises the seconds of recomputation, gathers and copies, under the
room of the device at every point of the step at which it may be short: the turn from forward to backward; the backward
of the last block of each pair, when all blocks before it hold what they kept, and those behind it what stays; and the
optimizer. A greedy choice is what it is compared with, and bounds it: from the fastest treatments on, one block after
the other gets that which frees the missing bytes at the least cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, TypeAlias

from legoai.runtime.linear_program import LinearProgram

_MOST_NODES: Final = 5000
"""Of the integer program; the same on every machine."""

Pair: TypeAlias = tuple[int, int]
"""Indices of a treatment of `checkpoint` and of one of `fsdp`; both ascend in the bytes that blocks hold."""

Rule: TypeAlias = tuple[int, int, int]
"""The treatment of the first blocks, that of the others, and how many are the first; 0 where all have the same."""


@dataclass(frozen=True, slots=True)
class PairCosts:
    """What blocks of a pair take.

    Attributes:
        seconds: of a block in a step, above those of a block of some other pair.
        held: bytes of a block from its forward to its backward, above those of a block of that pair.
        stays: bytes behind its backward, likewise above what that pair holds before it.
        peak: active bytes around the turn from forward to backward if all blocks are of this pair.
        inside: likewise in the backward of the last block.
        optimizer: likewise while the optimizer runs.
        unused: bytes that the allocator reserves beyond what is active.
    """

    seconds: float
    held: float
    stays: float
    peak: float
    inside: float
    optimizer: float
    unused: float = 0.0


class Offloading(NamedTuple):
    """A way to offload.

    Attributes:
        seconds: that it adds to a step.
        bytes: that it adds to what is active before the optimizer.
        optimizer: that it adds in the optimizer.
        unused: that the allocator reserves under it beyond what is active, at least.
    """

    seconds: float
    bytes: float
    optimizer: float
    unused: float = 0.0


class Division(NamedTuple):
    """A choice that a plan can write.

    Attributes:
        checkpoint: its rule.
        fsdp: its rule.
        offloading: which way.
    """

    checkpoint: Rule
    fsdp: Rule
    offloading: int


def chain(checkpoint: Rule, fsdp: Rule, blocks: int) -> list[tuple[Pair, int]]:
    """The pairs of blocks in the model's order under two rules, each with the number of blocks."""
    (low, high, some), (less, more, units) = checkpoint, fsdp
    found, start = [], 0
    for end in sorted({some, units, blocks} - {0}):
        pair = (low if start < some else high, less if start < units else more)
        found.append((pair, end - start))
        start = end
    return found


def one_more(rule: Rule, blocks: int) -> Iterator[Rule]:
    """Rules under which the first blocks are one more, the first of them if there were none."""
    low, high, some = rule
    for one in [low] if some else range(high):
        yield (one, one, 0) if some + 1 == blocks else (one, high, some + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class JointChoice:
    """What was chosen.

    Attributes:
        division: the choice; None where nothing fits.
        seconds: of a step, above one whose blocks are all of the pair that others are compared with.
        bound: no choice that fits takes less.
        status: `optimal`, `stopped` at the limit of nodes, or `infeasible`.
    """

    division: Division | None
    seconds: float
    bound: float
    status: Literal["optimal", "stopped", "infeasible"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProblem:
    """Equal blocks whose treatments are to be chosen.

    Attributes:
        blocks: their number.
        pairs: what each pair takes; pairs that are missing are not chosen.
        offloadings: ways to offload.
        active: bytes of active memory that a rank may have.
        reserved: bytes that its allocator may reserve.
        seconds: of a step whose blocks are all of the pair that others are compared with.
    """

    blocks: int
    pairs: Mapping[Pair, PairCosts]
    offloadings: Sequence[Offloading]
    active: float
    reserved: float
    seconds: float = 0.0

    def chain(self, division: Division) -> list[tuple[Pair, int]]:
        """The pairs of the blocks in the model's order, each with the number of blocks."""
        return chain(division.checkpoint, division.fsdp, self.blocks)

    def time(self, division: Division) -> float:
        """Seconds of a choice, above those of a step whose blocks are all of the pair that others are compared with."""
        taken = sum(count * self.pairs[pair].seconds for pair, count in self.chain(division))
        return taken + self.offloadings[division.offloading].seconds

    def needed(self, division: Division) -> Iterator[float]:
        """Bytes of active memory at each point of the step."""
        chain = [(self.pairs[pair], count) for pair, count in self.chain(division)]
        offloaded = self.offloadings[division.offloading]
        last = chain[-1][0]
        yield last.peak + sum(count * (one.held - last.held) for one, count in chain) + offloaded.bytes
        for place, (own, _) in enumerate(chain):
            before = sum(count * (one.held - own.held) for one, count in chain[:place])
            behind = sum(count * (one.stays - own.held) for one, count in chain[place + 1 :])
            yield own.inside + before + behind + offloaded.bytes
        one, _ = chain[0]
        stays = sum(count * (other.optimizer - one.optimizer) for other, count in chain) / self.blocks
        yield one.optimizer + stays + offloaded.optimizer

    def unused(self, division: Division) -> float:
        """Bytes that the allocator reserves beyond what is active: as many as where it does most.

        What fragments memory under one of the pairs, or a way to offload, does so beside the others too.
        """
        most = max(self.pairs[pair].unused for pair, _ in self.chain(division))
        return max(most, self.offloadings[division.offloading].unused)

    def excess(self, division: Division) -> float:
        """Bytes that a choice takes beyond its room; at most 0 where it fits."""
        most = max(self.needed(division))
        return max(most - self.active, most + self.unused(division) - self.reserved)

    def corrected(self, division: Division, active: float, reserved: float) -> MemoryProblem:
        """The problem with less room, or more, by what a choice was observed to take beyond what was expected.

        Args:
            division: the choice.
            active: bytes that were active at its peak.
            reserved: bytes that its allocator reserved.
        """
        most = max(self.needed(division))
        return replace(
            self,
            active=self.active - (active - most),
            reserved=self.reserved - (reserved - most - self.unused(division)),
        )

    def greedy(self) -> Division | None:
        """A choice that fits, found by one block after the other; None where it ends without one."""
        ways = range(len(self.offloadings))
        pair = min(self.pairs, key=lambda pair: self.pairs[pair].seconds)
        way = min(ways, key=lambda way: self.offloadings[way].seconds)
        now = Division((pair[0], pair[0], 0), (pair[1], pair[1], 0), way)
        while (excess := self.excess(now)) > 0.0:
            steps = []
            for one in self._steps(now):
                freed = excess - max(self.excess(one), 0.0)
                if freed > 0.0:
                    steps.append(((self.time(one) - self.time(now)) / freed, one))
            if not steps:
                return None
            now = min(steps)[1]
        return now

    def _steps(self, now: Division) -> Iterator[Division]:
        """Choices in which one block more holds less, or more is offloaded."""
        changed = [now._replace(checkpoint=rule) for rule in one_more(now.checkpoint, self.blocks)]
        changed += [now._replace(fsdp=rule) for rule in one_more(now.fsdp, self.blocks)]
        yield from (one for one in changed if self._known(one))
        for way in range(len(self.offloadings)):
            if way != now.offloading:
                yield now._replace(offloading=way)

    def _known(self, division: Division) -> bool:
        return all(pair in self.pairs for pair, _ in self.chain(division))

    def solve(self) -> JointChoice:
        """The choice of least time that fits; the greedy one where the program has no better.

        Raises:
            SolverMissingError: no solver is installed.
            SolverFailedError: it ended without an answer.
        """
        greedy = self.greedy()
        most = math.inf if greedy is None else self.time(greedy)
        found = _Program(self, most).solve()
        if found is None:
            if greedy is None:
                return JointChoice(division=None, seconds=math.inf, bound=math.inf, status="infeasible")
            return JointChoice(division=greedy, seconds=most, bound=most, status="optimal")
        division, bound, optimal = found
        if division is None or self.time(division) >= most:
            division = greedy
        seconds = math.inf if division is None else self.time(division)
        return JointChoice(
            division=division, seconds=seconds, bound=min(bound, seconds), status="optimal" if optimal else "stopped"
        )


class _Program:
    """The integer program.

    Args:
        problem: whose blocks are counted.
        most: seconds of a choice that is known to fit; infinite where none is known.
    """

    def __init__(self, problem: MemoryProblem, most: float) -> None:
        self.problem = problem
        self.program = program = LinearProgram()
        taken = [abs(one.seconds) * problem.blocks for one in problem.pairs.values()]
        taken += [abs(one.seconds) for one in problem.offloadings]
        self.scale = max([*taken, 1e-12])
        self.pairs = sorted(problem.pairs)
        costs = {pair: problem.pairs[pair].seconds / self.scale for pair in self.pairs}
        self.count = {
            pair: program.variable(high=problem.blocks, integer=True, cost=costs[pair]) for pair in self.pairs
        }  # fmt: skip
        self.used = {pair: program.variable(high=1.0, integer=True) for pair in self.pairs}
        self.last = {pair: program.variable(high=1.0, integer=True) for pair in self.pairs}
        self.way = [
            program.variable(high=1.0, integer=True, cost=one.seconds / self.scale) for one in problem.offloadings
        ]
        program.equal(dict.fromkeys(self.count.values(), 1.0), problem.blocks)
        program.equal(dict.fromkeys(self.last.values(), 1.0), 1.0)
        program.equal(dict.fromkeys(self.way, 1.0), 1.0)
        self._chained()
        self._fit()
        if math.isfinite(most):
            terms = {self.count[pair]: costs[pair] for pair in self.pairs}
            terms |= {one: cost.seconds / self.scale for one, cost in zip(self.way, problem.offloadings, strict=True)}
            program.at_most(terms, most / self.scale + 1e-9)

    def _chained(self) -> None:
        """Rows: the pairs that are used follow each other, of two treatments of each kind at most."""
        program, blocks = self.program, float(self.problem.blocks)
        for pair in self.pairs:
            program.at_most({self.count[pair]: 1.0, self.used[pair]: -blocks}, 0.0)
            program.at_most({self.used[pair]: 1.0, self.count[pair]: -1.0}, 0.0)
            program.at_most({self.last[pair]: 1.0, self.used[pair]: -1.0}, 0.0)
            for other in self.pairs:
                if pair < other and other[1] < pair[1]:  # neither follows the other
                    program.at_most({self.used[pair]: 1.0, self.used[other]: 1.0}, 1.0)
                if pair != other and _follows(other, pair):
                    program.at_most({self.last[pair]: 1.0, self.used[other]: 1.0}, 1.0)
        for place in (0, 1):
            chosen = []
            for treatment in sorted({pair[place] for pair in self.pairs}):
                chosen.append(program.variable(high=1.0, integer=True))
                for pair in self.pairs:
                    if pair[place] == treatment:
                        program.at_most({self.used[pair]: 1.0, chosen[-1]: -1.0}, 0.0)
            program.at_most(dict.fromkeys(chosen, 1.0), 2.0)

    def _fit(self) -> None:
        """Rows: at each point there is room for what is active, and for what the allocator reserves with it."""
        problem = self.problem
        unused = {self.used[pair]: costs.unused for pair, costs in problem.pairs.items()}
        least = min(unused.values())
        unused |= {one: way.unused for one, way in zip(self.way, problem.offloadings, strict=True)}
        beyond = max(unused.values()) - least
        most_unused = self.program.variable(high=1.0)  # as a share: solvers take coefficients below 1e-9 for zeros
        for chosen, size in unused.items():
            if size > least:
                self.program.at_most({chosen: (size - least) / beyond, most_unused: -1.0}, 0.0)
        for room, beside in ((problem.active, {}), (problem.reserved - least, {most_unused: beyond})):
            if math.isinf(room):
                continue
            for terms, limit, when in self._points(room):
                side = limit
                terms.update(beside)
                if when is not None:
                    # No more than all blocks of the pair that takes most: the row says nothing unless it is used.
                    most = max(0.0, problem.blocks * max(terms[self.count[pair]] for pair in self.pairs)) - side
                    most += max(0.0, *(terms[one] for one in self.way))
                    most += beyond if beside else 0.0
                    if most <= 0.0:
                        continue
                    terms[when] = most
                    side += most
                size = max(abs(side), 1.0)
                self.program.at_most({index: value / size for index, value in terms.items()}, side / size)

    def _points(self, room: float) -> Iterator[tuple[dict[int, float], float, int | None]]:
        """Rows: bytes of variables, their room, and the variable that says whether the row counts."""
        problem, costs = self.problem, self.problem.pairs
        ways = {one: cost.bytes for one, cost in zip(self.way, problem.offloadings, strict=True)}
        held = {self.count[pair]: costs[pair].held for pair in self.pairs}
        around = {self.last[pair]: costs[pair].peak - problem.blocks * costs[pair].held for pair in self.pairs}
        yield {**held, **around, **ways}, room, None
        for own in self.pairs:
            one = costs[own]
            terms = {
                self.count[pair]: (costs[pair].stays if pair != own and _follows(pair, own) else costs[pair].held)
                for pair in self.pairs
            }
            yield {**terms, **ways}, room - one.inside + problem.blocks * one.held, self.used[own]
        ways = {one: cost.optimizer for one, cost in zip(self.way, problem.offloadings, strict=True)}
        yield {**{self.count[pair]: costs[pair].optimizer / problem.blocks for pair in self.pairs}, **ways}, room, None

    def solve(self) -> tuple[Division | None, float, bool] | None:
        """The choice, a bound of its seconds and whether it is optimal; None where nothing fits."""
        found = self.program.solve(node_limit=_MOST_NODES)
        if found.status == "infeasible":
            return None
        bound = -math.inf if found.bound is None else found.bound * self.scale
        if not found.values:
            return None, bound, False
        counts = {pair: round(found.values[self.count[pair]]) for pair in self.pairs}
        way = max(range(len(self.way)), key=lambda one: found.values[self.way[one]])
        parts = []
        for place in (0, 1):
            of_treatment = {
                one: sum(count for pair, count in counts.items() if pair[place] == one)
                for one in sorted({pair[place] for pair, count in counts.items() if count})
            }
            low, high = min(of_treatment), max(of_treatment)
            parts.append((low, high, of_treatment[low] if low != high else 0))
        return Division(parts[0], parts[1], way), bound, found.status == "optimal"


def _follows(pair: Pair, other: Pair) -> bool:
    """Whether blocks of a pair stand behind those of another, or are of it."""
    return pair[0] >= other[0] and pair[1] >= other[1]
