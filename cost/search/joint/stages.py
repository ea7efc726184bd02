"""Memory problem of a pipeline, from the observed costs of the listed values of its holes in each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from legoai.cost.search.evaluation.evaluator import Figures
from legoai.cost.search.joint.holes import MemoryHoles, Values, Written
from legoai.cost.search.joint.observed import Observations
from legoai.cost.search.memory.program import Offloading, Pair, chain
from legoai.cost.search.memory.stage_blocks import RankMemory, StageBlocks, StagePair, StageRules
from legoai.cost.search.memory.stage_points import StagePoints
from legoai.cost.search.memory.stage_program import StagedDivision, StagedMemoryProblem
from legoai.cost.search.stages.action_graph import ActionGraph
from legoai.cost.search.stages.costs import Room


class ObservedStageMemory(Observations):
    """Observed costs of listed values of the holes in the stages of a pipeline.

    The bytes of a rank at the peak of one stage's backward are attributed to its stages in proportion to their blocks
    times their in-flight micro batches; all other bytes of the rank in proportion to their blocks.

    Args:
        holes: the plan's memory holes.
        own: the reference values, from which costs are differences.
        figures: simulated figures, by the values of the three holes.
        graph: graph of the schedule's actions.
        blocks: number of blocks of each stage.
    """

    def __init__(
        self,
        holes: MemoryHoles,
        own: Values,
        figures: Mapping[Values, Figures],
        graph: ActionGraph,
        blocks: Sequence[int],
    ) -> None:
        self.graph = graph
        self.blocks = blocks
        super().__init__(holes, own, figures)

    @staticmethod
    def are_usable(figures: Figures) -> bool:
        """See :class:`Observations`."""
        return bool(figures.ranks) and all(rank.stages for rank in figures.ranks)

    def held(self, figures: Figures) -> tuple[float, float]:
        """See :class:`Observations`; summed over the stages of all ranks."""
        own = sum(stage.before for rank in figures.ranks for stage in rank.stages)
        base = sum(stage.before for rank in self.base.ranks for stage in rank.stages)
        optimizer = sum(rank.optimizer for rank in figures.ranks) - sum(rank.optimizer for rank in self.base.ranks)
        return own - base, optimizer

    def _actions(self, figures: Figures) -> list[dict[str, float]]:
        """Seconds of the actions of each stage, by kind."""
        found: list[dict[str, float]] = [{} for _ in self.blocks]
        for name, seconds in figures.stages.actions.items():
            found[int(name[:-1])][name[-1]] = seconds
        return found

    def _besides(self, figures: Figures) -> float:
        """Seconds of a step outside the longest path through the actions."""
        return figures.step_time - self.graph.longest(self._actions(figures))[0]

    def _costs(self, figures: Figures) -> dict[int, StagePair]:
        """Costs of a pair in each stage, from the figures of a step whose blocks all have it."""
        actions, base = self._actions(figures), self._actions(self.base)
        besides = (self._besides(figures) - self._besides(self.base)) / sum(self.blocks)
        found = {}
        for number, (rank, own) in enumerate(zip(figures.ranks, self.base.ranks, strict=True)):
            count = sum(self.blocks[stage.stage] for stage in rank.stages)
            for stage, seen in zip(rank.stages, own.stages, strict=True):
                more = {
                    other.stage: _share_of_block(other.before - before.before, other, self.blocks, stage.stage)
                    for other, before in zip(rank.stages, own.stages, strict=True)
                }
                held = more.pop(stage.stage)
                others = (stage.before - seen.before) - held * self.blocks[stage.stage]
                found[stage.stage] = StagePair(
                    seconds={
                        kind: (seconds - base[stage.stage][kind]) / self.blocks[stage.stage]
                        for kind, seconds in actions[stage.stage].items()
                    },
                    besides=besides,
                    held=held,
                    stays=held - stage.released,
                    peak=stage.peak - others,
                    inside=stage.inside - others,
                    beside=more,
                    elsewhere=(rank.elsewhere - own.elsewhere) / count,
                    optimizer=(rank.optimizer - own.optimizer) / count,
                    unused=figures.stages.unused[number],
                )
        return found

    def problem(self, room: Room) -> StagedMemoryProblem:
        """The problem; the costs of a pair that was not simulated are the sum of its treatments' differences."""
        base = self._costs(self.base)
        pairs: list[dict[Pair, StagePair]] = [{} for _ in self.blocks]
        for pair, found in self.pairs():
            each = [self._costs(one) for one in found]
            for stage, own in enumerate(pairs):
                own[pair] = each[0][stage] if len(each) == 1 else _added(each[0][stage], each[1][stage], base[stage])
        ranks = []
        for number, rank in enumerate(self.base.ranks):
            offloadings = []
            for way in self.ways:
                figures = self.every[self.own._replace(offload=way)]
                points, active = figures.ranks[number] if figures.ranks else rank, figures.stages.active[number]
                offloadings.append(
                    Offloading(
                        0.0,
                        active - self.base.stages.active[number],
                        points.optimizer - rank.optimizer,
                        0.0 if way == self.own.offload else figures.stages.unused[number],
                    )
                )
            ranks.append(
                RankMemory(
                    stages=[
                        StageBlocks(stage=one.stage, blocks=self.blocks[one.stage], pairs=pairs[one.stage])
                        for one in rank.stages
                    ],
                    elsewhere=rank.elsewhere,
                    optimizer=rank.optimizer,
                    offloadings=offloadings,
                    active=room.active,
                    reserved=min(room.reserved, room.device - rank.outside),
                )
            )
        return StagedMemoryProblem(
            ranks=ranks,
            graph=self.graph,
            actions=self._actions(self.base),
            besides=self._besides(self.base),
            offloadings=[
                self.every[self.own._replace(offload=way)].step_time - self.base.step_time for way in self.ways
            ],
            micro_batches=1 + max(action.micro_batch for action in self.graph.actions),
        )

    def corrected(self, problem: StagedMemoryProblem, written: Written, seen: Figures) -> StagedMemoryProblem:
        """The problem with limits corrected by a simulated solution."""
        active = seen.stages.active
        reserved = [one + unused for one, unused in zip(active, seen.stages.unused, strict=True)]
        return problem.corrected(self.division(written), active, reserved)

    def predicted(self, problem: StagedMemoryProblem, division: StagedDivision) -> float:
        """Predicted seconds of a step."""
        return problem.time(division)

    def written(self, division: StagedDivision) -> Written:
        """A solution in terms of the holes' values."""
        return Written(
            tuple(self.written_rule(0, rules.checkpoint) for rules in division.stages),
            tuple(self.written_rule(1, rules.fsdp) for rules in division.stages),
            self.ways[division.offloading],
        )

    def division(self, written: Written) -> StagedDivision:
        """The inverse of :meth:`written`."""
        both = zip(written.checkpoint, written.fsdp, strict=True)
        rules = tuple(StageRules(self.rule(0, checkpoint), self.rule(1, fsdp)) for checkpoint, fsdp in both)
        return StagedDivision(rules, self.ways.index(written.offload))

    def alike(self, written: Written) -> list[Values]:
        """The listed values that give all blocks one of the solution's pairs."""
        both = zip(self.division(written).stages, self.blocks, strict=True)
        pairs = {pair for rules, blocks in both for pair, _ in chain(*rules, blocks)}
        return [self.uniform(pair) for pair in sorted(pairs)]


def _share_of_block(bytes: float, moment: StagePoints, blocks: Sequence[int], stage: int) -> float:
    """Share of one block of a stage in the bytes of a rank at a peak, by in-flight micro batches."""
    under_way = dict(moment.under_way)
    every = sum(count * blocks[one] for one, count in under_way.items())
    return bytes * under_way.get(stage, 0) / every


def _added(left: StagePair, right: StagePair, base: StagePair) -> StagePair:
    """The reference costs plus the differences of two others from them."""

    def added(one: float, other: float, both: float) -> float:
        return one + other - both

    kinds = left.seconds.keys() & right.seconds.keys()
    names = ("besides", "held", "stays", "peak", "inside", "elsewhere", "optimizer", "unused")
    return StagePair(
        seconds={kind: added(left.seconds[kind], right.seconds[kind], base.seconds[kind]) for kind in sorted(kinds)},
        beside={one: added(left.beside[one], right.beside[one], base.beside[one]) for one in sorted(left.beside)},
        **{name: added(getattr(left, name), getattr(right, name), getattr(base, name)) for name in names},
    )
