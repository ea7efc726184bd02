"""Memory problem of a model without stages, from the observed costs of the listed values of its holes."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import astuple, replace

from legoai.cost.search.evaluation.evaluator import Figures
from legoai.cost.search.joint.holes import Kind, MemoryHoles, Values, Written, WrittenRule
from legoai.cost.search.memory.program import Division, MemoryProblem, Offloading, Pair, PairCosts, Rule, chain
from legoai.cost.search.stages.costs import Room


class Observations(ABC):
    """Observed costs of listed values of the holes, and the order of these values by the memory that they hold.

    Args:
        holes: the plan's memory holes.
        own: the reference values, from which costs are differences.
        figures: simulated figures, by the values of the three holes.
    """

    def __init__(self, holes: MemoryHoles, own: Values, figures: Mapping[Values, Figures]) -> None:
        self.holes = holes
        self.own = own
        self.every = figures
        self.figures = {values: one for values, one in figures.items() if self.are_usable(one)}
        self.base = figures[own]
        self.kinds = [self._ordered(kind) for kind in (0, 1)]
        self.ways: list[int | None] = [one for one in holes.listed(2) if own._replace(offload=one) in figures]
        self.ways = self.ways or [own.offload]

    @staticmethod
    @abstractmethod
    def are_usable(figures: Figures) -> bool:
        """Whether figures include the memory of blocks."""

    @abstractmethod
    def held(self, figures: Figures) -> tuple[float, float]:
        """Bytes that blocks hold before and after their backward, as differences from the reference."""

    def _reference_or(self, kind: Kind, value: int | None) -> Values:
        """The reference values with another value of one hole."""
        return Values(*(value if place == kind else one for place, one in enumerate(self.own)))

    def _ordered(self, kind: Kind) -> list[int | None]:
        """The simulated values of a hole, in ascending order of the bytes that blocks hold."""
        known: list[int | None] = [
            one for one in self.holes.listed(kind) if self._reference_or(kind, one) in self.figures
        ]
        if not known:
            return [self.own[kind]]
        return sorted(known, key=lambda one: (*self.held(self.figures[self._reference_or(kind, one)]), one or 0))

    def uniform(self, pair: Pair) -> Values:
        """The values that give all blocks one pair."""
        return self.own._replace(checkpoint=self.kinds[0][pair[0]], fsdp=self.kinds[1][pair[1]])

    def pairs(self) -> Iterator[tuple[Pair, list[Figures]]]:
        """Each pair with its figures, or where it was not simulated, with those of each of its treatments alone."""
        for pair in itertools.product(range(len(self.kinds[0])), range(len(self.kinds[1]))):
            values = self.uniform(pair)
            if values in self.figures:
                yield pair, [self.figures[values]]
            else:
                apart = (self.own._replace(checkpoint=values.checkpoint), self.own._replace(fsdp=values.fsdp))
                yield pair, [self.figures[one] for one in apart]

    def values(self, written: Written) -> Values:
        """The holes' values for a solution; new values are added to the plan."""
        return Values(self.holes.value(0, written.checkpoint), self.holes.value(1, written.fsdp), written.offload)

    def rule(self, kind: Kind, written: WrittenRule) -> Rule:
        """A rule in terms of the order by held bytes."""
        low, high, some = written
        return self.kinds[kind].index(low), self.kinds[kind].index(high), some

    def written_rule(self, kind: Kind, rule: Rule) -> WrittenRule:
        """The inverse of :meth:`rule`."""
        low, high, some = rule
        return self.kinds[kind][low], self.kinds[kind][high], some


class ObservedMemory(Observations):
    """Observed costs of listed values of the holes in a model without stages."""

    def __init__(self, holes: MemoryHoles, own: Values, figures: Mapping[Values, Figures]) -> None:
        self.blocks = figures[own].points.blocks
        super().__init__(holes, own, figures)

    @staticmethod
    def are_usable(figures: Figures) -> bool:
        """See :class:`Observations`."""
        return figures.points.blocks > 0

    def held(self, figures: Figures) -> tuple[float, float]:
        """See :class:`Observations`."""
        costs = self._costs(figures)
        return costs.held, costs.stays

    def _costs(self, figures: Figures) -> PairCosts:
        points, base = figures.points, self.base.points
        stay = (points.optimizer - base.optimizer) / self.blocks
        return PairCosts(
            seconds=(figures.step_time - self.base.step_time) / self.blocks,
            held=points.released + stay - base.released,
            stays=stay - base.released,
            peak=points.peak,
            inside=points.inside,
            optimizer=points.optimizer,
            unused=figures.reserved - figures.active,
        )

    def problem(self, room: Room) -> MemoryProblem:
        """The problem; the costs of a pair that was not simulated are the sum of its treatments' differences."""
        base = self._costs(self.base)
        pairs: dict[Pair, PairCosts] = {}
        for pair, found in self.pairs():
            each = [self._costs(one) for one in found]
            pairs[pair] = each[0] if len(each) == 1 else _added(each[0], each[1], base)
        offloadings = []
        for way in self.ways:
            figures = self.every[self.own._replace(offload=way)]
            offloadings.append(
                Offloading(
                    figures.step_time - self.base.step_time,
                    figures.active - self.base.active,
                    figures.points.optimizer - self.base.points.optimizer,
                    0.0 if way == self.own.offload else figures.reserved - figures.active,
                )
            )
        return MemoryProblem(
            blocks=self.blocks,
            pairs=pairs,
            offloadings=offloadings,
            active=room.active,
            reserved=min(room.reserved, room.device - self.base.points.outside),
            seconds=self.base.step_time,
        )

    def corrected(self, problem: MemoryProblem, written: Written, seen: Figures) -> MemoryProblem:
        """The problem with limits corrected by a simulated solution."""
        return problem.corrected(self.division(written), seen.active, seen.reserved)

    def predicted(self, problem: MemoryProblem, division: Division) -> float:
        """Predicted seconds of a step."""
        return problem.seconds + problem.time(division)

    def written(self, division: Division) -> Written:
        """A solution in terms of the holes' values."""
        checkpoint, fsdp = self.written_rule(0, division.checkpoint), self.written_rule(1, division.fsdp)
        return Written((checkpoint,), (fsdp,), self.ways[division.offloading])

    def division(self, written: Written) -> Division:
        """The inverse of :meth:`written`."""
        [checkpoint], [fsdp] = written.checkpoint, written.fsdp
        return Division(self.rule(0, checkpoint), self.rule(1, fsdp), self.ways.index(written.offload))

    def alike(self, written: Written) -> list[Values]:
        """The listed values that give all blocks one of the solution's pairs."""
        division = self.division(written)
        return [self.uniform(pair) for pair, _ in chain(division.checkpoint, division.fsdp, self.blocks)]


def _added(left: PairCosts, right: PairCosts, base: PairCosts) -> PairCosts:
    """The reference costs plus the differences of two others from them."""
    parts = zip(astuple(left), astuple(right), astuple(base), strict=True)
    return PairCosts(*(one + other - both for one, other, both in parts))


def beside_what_is_of(own: Figures, figures: Figures, base: Figures) -> Figures:
    """Figures of a step in steady state whose blocks are those of one candidate, and all else that of another.

    Args:
        own: of the other candidate.
        figures: of the one.
        base: of a third, whose blocks are those of the other, and all else that of the one.
    """
    points = replace(
        figures.points,
        peak=figures.points.peak + own.points.peak - base.points.peak,
        released=figures.points.released + own.points.released - base.points.released,
        inside=figures.points.inside + own.points.inside - base.points.inside,
        optimizer=figures.points.optimizer + own.points.optimizer - base.points.optimizer,
    )
    active = figures.active + own.active - base.active
    metrics = {
        "step_time seconds": figures.step_time + own.step_time - base.step_time,
        "peak_memory bytes": active,
        "reserved_memory bytes": active + figures.reserved - figures.active,
    }
    return replace(figures, metrics={**figures.metrics, **metrics}, points=points)
