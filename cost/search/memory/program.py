"""Joint choice of recomputation, resharding and offloading for equal blocks, as an integer program.

A block has a pair of treatments: one of `checkpoint` and one of `fsdp`. Blocks are equal, so a choice consists of the
number of blocks of each pair and their order. The last blocks of the model hold the most memory: their backward runs
first, and frees that memory before blocks that recompute need memory for their activations. A rule divides its blocks
into two groups at most. So the blocks form a chain of pairs, along which the bytes held ascend for both treatments.

The program counts the blocks of each pair. It minimises the seconds of recomputation, all-gathers and copies under the
memory limit at each point of the step that may be the peak: the end of forward; the backward of the last block of each
pair, when the blocks before it hold their activations and the blocks after it what their backward does not free; and
the optimizer. Of the last pair it is the last block but one: buffers of other units are not there before. A greedy
choice serves as baseline and as upper bound: it starts from the fastest treatments, and changes one block at a time, by
the change that frees missing bytes at the least cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar

from legoai.runtime.linear_program import LinearProgram

_MOST_NODES: Final = 5000
"""Node limit of the integer program, which does not depend on the machine as a time limit would."""

Pair: TypeAlias = tuple[int, int]
"""Indices of a treatment of `checkpoint` and of one of `fsdp`; both ascend with the bytes that blocks hold."""

_Choice = TypeVar("_Choice")

Rule: TypeAlias = tuple[int, int, int]
"""Treatment of the first blocks, treatment of the others, and number of first blocks; 0 where all have the second."""


@dataclass(frozen=True, slots=True)
class PairCosts:
    """Time and memory of the blocks of a pair.

    Costs of one block are differences from a block of the reference pair, which is the same for all pairs of a problem.

    Attributes:
        seconds: difference in seconds per block and step.
        held: difference in bytes per block between its forward and its backward.
        stays: bytes per block after its backward, less the bytes that a block of the reference pair holds before it.
        peak: peak of active bytes from forward to the start of backward, if all blocks have this pair.
        inside: peak of active bytes in the backward of the last block, if all blocks have this pair.
        optimizer: peak of active bytes while the optimizer runs, if all blocks have this pair.
        unused: bytes that the allocator reserves beyond the active ones.
    """

    seconds: float
    held: float
    stays: float
    peak: float
    inside: float
    optimizer: float
    unused: float = 0.0


class Offloading(NamedTuple):
    """Costs of one value of `offload`, as differences from the value of the reference.

    Attributes:
        seconds: seconds that it adds to a step.
        bytes: active bytes that it adds before the optimizer runs.
        optimizer: active bytes that it adds while the optimizer runs.
        unused: least bytes that the allocator reserves beyond the active ones.
    """

    seconds: float
    bytes: float
    optimizer: float
    unused: float = 0.0


class Division(NamedTuple):
    """Choice that a plan can write: two rules for its blocks, and a value of `offload`.

    Attributes:
        checkpoint: rule of `checkpoint`.
        fsdp: rule of `fsdp`.
        offloading: index among the problem's offloadings.
    """

    checkpoint: Rule
    fsdp: Rule
    offloading: int


def chain(checkpoint: Rule, fsdp: Rule, blocks: int) -> list[tuple[Pair, int]]:
    """Pairs of the blocks in the model's order under two rules, each with its number of blocks."""
    (low, high, some), (less, more, units) = checkpoint, fsdp
    found, start = [], 0
    for end in sorted({some, units, blocks} - {0}):
        pair = (low if start < some else high, less if start < units else more)
        found.append((pair, end - start))
        start = end
    return found


def cheapest(steps: Iterable[tuple[float, float, _Choice]]) -> _Choice | None:
    """The choice that frees a byte at the least cost; None where none frees any.

    Args:
        steps: cost in seconds, freed bytes and result of each change.
    """
    return min(((cost / freed, one) for cost, freed, one in steps if freed > 0.0), default=(0.0, None))[1]


def one_more(rule: Rule, blocks: int) -> Iterator[Rule]:
    """Yield the rules with one more first block; where there was none, one rule for each treatment that holds less."""
    low, high, some = rule
    for one in [low] if some else range(high):
        yield (one, one, 0) if some + 1 == blocks else (one, high, some + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class JointChoice:
    """Solution of a memory problem.

    Attributes:
        division: the choice; None where none fits.
        seconds: seconds of a step, as difference from a step whose blocks all have the reference pair.
        bound: lower bound of the seconds of all choices that fit.
        status: `optimal`, `stopped` at the node limit, or `infeasible`.
    """

    division: Division | None
    seconds: float
    bound: float
    status: Literal["optimal", "stopped", "infeasible"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProblem:
    """Choice of the treatments of equal blocks under a memory limit.

    Attributes:
        blocks: number of blocks.
        pairs: costs of each pair; pairs that are missing are not chosen.
        offloadings: costs of each value of `offload`.
        active: limit of a rank's active memory, in bytes.
        reserved: limit of the bytes that a rank's allocator reserves.
        seconds: seconds of a step whose blocks all have the reference pair.
    """

    blocks: int
    pairs: Mapping[Pair, PairCosts]
    offloadings: Sequence[Offloading]
    active: float
    reserved: float
    seconds: float = 0.0

    def chain(self, division: Division) -> list[tuple[Pair, int]]:
        """Pairs of the blocks in the model's order, each with its number of blocks."""
        return chain(division.checkpoint, division.fsdp, self.blocks)

    def time(self, division: Division) -> float:
        """Seconds of a step, as difference from a step whose blocks all have the reference pair."""
        taken = sum(count * self.pairs[pair].seconds for pair, count in self.chain(division))
        return taken + self.offloadings[division.offloading].seconds

    def needed(self, division: Division) -> Iterator[float]:
        """Yield the bytes of active memory at each point of the step that may be the peak."""
        chain = [(self.pairs[pair], count) for pair, count in self.chain(division)]
        offloaded = self.offloadings[division.offloading]
        last = chain[-1][0]
        yield last.peak + sum(count * (one.held - last.held) for one, count in chain) + offloaded.bytes
        for place, (own, _) in enumerate(chain):
            before = sum(count * (one.held - own.held) for one, count in chain[:place])
            after = sum(count * (one.stays - own.held) for one, count in chain[place + 1 :])
            after += 0.0 if chain[place + 1 :] else own.stays - own.held
            yield own.inside + before + after + offloaded.bytes
        one, _ = chain[0]
        stays = sum(count * (other.optimizer - one.optimizer) for other, count in chain) / self.blocks
        yield one.optimizer + stays + offloaded.optimizer

    def unused(self, division: Division) -> float:
        """Bytes that the allocator reserves beyond the active ones: the maximum over the pairs and the offloading.

        A treatment that fragments memory is assumed to fragment it as much where only some blocks have it.
        """
        most = max(self.pairs[pair].unused for pair, _ in self.chain(division))
        return max(most, self.offloadings[division.offloading].unused)

    def excess(self, division: Division) -> float:
        """Bytes by which a choice exceeds its limit, active or reserved; at most 0 where it fits."""
        most = max(self.needed(division))
        return max(most - self.active, most + self.unused(division) - self.reserved)

    def corrected(self, division: Division, active: float, reserved: float) -> MemoryProblem:
        """The problem with its limits corrected by the error of the prediction for one choice.

        Args:
            division: the choice.
            active: simulated peak of active bytes.
            reserved: simulated bytes that the allocator reserves.
        """
        most = max(self.needed(division))
        return replace(
            self,
            active=self.active - (active - most),
            reserved=self.reserved - (reserved - most - self.unused(division)),
        )

    def greedy(self) -> Division | None:
        """A choice that fits, found by changing one block at a time; None where no change frees memory any more."""
        ways = range(len(self.offloadings))
        pair = min(self.pairs, key=lambda pair: self.pairs[pair].seconds)
        way = min(ways, key=lambda way: self.offloadings[way].seconds)
        now: Division | None = Division((pair[0], pair[0], 0), (pair[1], pair[1], 0), way)
        while now is not None and self.excess(now) > 0.0:
            now = self._changed(now)
        return now

    def _changed(self, now: Division) -> Division | None:
        """The change that frees missing bytes at the least cost.

        Where none frees missing bytes, the blocks hold less at the least cost: the first block of a treatment may leave
        more unused than it frees, and the peak may be at a point of the step that no block changes by itself.
        """
        steps = [(self.time(one) - self.time(now), one) for one in self._steps(now)]
        excess, held = self.excess(now), self._held(now)
        return cheapest((cost, excess - max(self.excess(one), 0.0), one) for cost, one in steps) or cheapest(
            (cost, held - self._held(one), one) for cost, one in steps if one.offloading == now.offloading
        )

    def _held(self, division: Division) -> float:
        """Bytes that the blocks hold between their forward and their backward, as differences."""
        return sum(count * self.pairs[pair].held for pair, count in self.chain(division))

    def _steps(self, now: Division) -> Iterator[Division]:
        """Yield the choices in which one more block holds less, or in which the offloading differs."""
        changed = [now._replace(checkpoint=rule) for rule in one_more(now.checkpoint, self.blocks)]
        changed += [now._replace(fsdp=rule) for rule in one_more(now.fsdp, self.blocks)]
        yield from (one for one in changed if self._known(one))
        for way in range(len(self.offloadings)):
            if way != now.offloading:
                yield now._replace(offloading=way)

    def _known(self, division: Division) -> bool:
        return all(pair in self.pairs for pair, _ in self.chain(division))

    def solve(self) -> JointChoice:
        """The choice of least time that fits; the greedy one where the program finds no better one.

        Raises:
            SolverMissingError: no solver is installed.
            SolverFailedError: the solver ended without an answer.
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
    """Integer program of a memory problem, with the numbers of blocks of the pairs as variables.

    Args:
        problem: the problem.
        most: seconds of a choice that is known to fit, an upper bound; infinite where none is known.
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
        """Add rows: the pairs in use form a chain, with two treatments of each kind at most."""
        program, blocks = self.program, float(self.problem.blocks)
        for pair in self.pairs:
            program.at_most({self.count[pair]: 1.0, self.used[pair]: -blocks}, 0.0)
            program.at_most({self.used[pair]: 1.0, self.count[pair]: -1.0}, 0.0)
            program.at_most({self.last[pair]: 1.0, self.used[pair]: -1.0}, 0.0)
            for other in self.pairs:
                if pair < other and other[1] < pair[1]:  # no chain has both
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
        """Add rows: at each point active memory, and reserved memory with the unused bytes, are within their limits."""
        problem = self.problem
        unused = {self.used[pair]: costs.unused for pair, costs in problem.pairs.items()}
        least = min(unused.values())
        unused |= {one: way.unused for one, way in zip(self.way, problem.offloadings, strict=True)}
        beyond = max(unused.values()) - least
        most_unused = self.program.variable(high=1.0)  # scaled to 1: solvers treat coefficients below 1e-9 as zero
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
                    # Big-M: all blocks have the most expensive pair. The row binds only if pair `own` is in use.
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
        """Yield rows: bytes of each variable, the limit, and the variable that enables the row, if any."""
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
            terms[self.last[own]] = one.stays - one.held
            yield {**terms, **ways}, room - one.inside + problem.blocks * one.held, self.used[own]
        ways = {one: cost.optimizer for one, cost in zip(self.way, problem.offloadings, strict=True)}
        yield {**{self.count[pair]: costs[pair].optimizer / problem.blocks for pair in self.pairs}, **ways}, room, None

    def solve(self) -> tuple[Division | None, float, bool] | None:
        """The choice, a lower bound of the seconds, and whether it is optimal; None where nothing fits."""
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
    """Whether blocks of a pair may come after blocks of another in a chain; true for equal pairs."""
    return pair[0] >= other[0] and pair[1] >= other[1]
