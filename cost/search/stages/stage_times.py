"""Lower bounds of the time of pipeline stages, shared by candidates with the same layers and the same split.

A schedule decides the number of stages and the ranks that hold them. Results are cached by split and number of micro
batches, whatever else is open or differs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from legoai.cost.search.lower_bounds.model_layers import ModelLayers
from legoai.cost.search.lower_bounds.recomputation import by_second_half
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.stages.pipeline import split_points, stages_between
from legoai.specs.directives.pipeline import MULTI_STAGE, SINGLE_STAGE, SPLIT_BACKWARD, V_SHAPED, Even


class Shape(NamedTuple):
    """Properties of a torch schedule apart from the order of its actions.

    Attributes:
        stages: number of stages.
        v_shaped: whether stages are placed on ranks in a V; otherwise in a loop.
        halves: whether backward is split into halves.
        in_turn: whether a rank runs all micro batches of one stage before the next stage.
    """

    stages: int
    v_shaped: bool
    halves: bool
    in_turn: bool


def shape_of(schedule: str, ranks: int, stages: int | None) -> Shape:
    """The shape of a schedule by its name; ``stages`` is the number of stages that the plan gives, if any."""
    assert schedule in SINGLE_STAGE + MULTI_STAGE
    count = stages if stages is not None else ranks * (1 if schedule in SINGLE_STAGE else 2)
    return Shape(count, schedule in V_SHAPED, schedule in SPLIT_BACKWARD, schedule == "LoopedBFS")


class RankTimes(NamedTuple):
    """Least seconds of the ranks of a pipeline with an even split, for any order of actions.

    Attributes:
        alone: step time of the least busy rank without recomputation.
        busiest: step time of the busiest rank.
        computes: seconds in which a mean rank computes.
        waits: seconds in which a mean rank is idle, before its first micro batch and after its last.
        through: seconds of one micro batch through the forwards and backwards of all stages.
    """

    alone: float
    busiest: float
    computes: float
    waits: float
    through: float


class StageTime(NamedTuple):
    """Least seconds of a stage for one micro batch; those of the halves of backward are 0 unless it is split."""

    forward: float
    backward: float
    recomputed: float
    of_inputs: float
    of_weights: float


@dataclass(slots=True)
class StageTimes:
    """Least seconds of the stages of one plan's candidates.

    Args:
        layers: least seconds of layers.
        again: seconds of recomputation for one micro batch, by the recomputing module.
    """

    layers: ModelLayers
    again: Callable[[Analysis], Mapping[str, float]]

    def of_ranks(self, analysis: Analysis, shape: Shape, batches: int) -> RankTimes:
        """Least seconds of the ranks of a pipeline with an even split, under any schedule of a shape.

        Raises:
            Undecided: the split, or a layer's time, depends on a hole.
        """
        # The order in which a rank runs its stages makes no difference here.
        return self.layers.once(analysis, self._of_ranks, shape._replace(in_turn=False), batches)

    def _of_ranks(self, analysis: Analysis, shape: Shape, batches: int) -> RankTimes:
        pipeline, ranks, known = analysis.plan.pipeline, analysis.plan.mesh.pp, split_points(analysis)
        assert pipeline is not None
        points = known.even(shape.stages, **weights_of(pipeline.split))
        edges = [0, *(known.position[point] for point in points), len(known.starts)]
        to_forward, to_backward, of_inputs = self.layers.once(analysis, self._computed_before)
        forward, backward = ([to[edge] for edge in edges] for to in (to_forward, to_backward))
        again = self.layers.once(analysis, self._recomputed_before)
        extra = [again[edge] for edge in edges]
        through = forward[-1] + backward[-1]
        if shape.halves:  # gradients of weights may come later; their share is known for eager programs only
            apart = not is_traced(analysis)
            through = forward[-1] + (backward[1] + of_inputs[-1] - of_inputs[edges[1]] if apart else 0.0)
        alone, busiest, computes, waits = math.inf, 0.0, 0.0, 0.0
        for rank in range(ranks):
            held = (rank, shape.stages - 1 - rank) if shape.v_shaped else range(rank, shape.stages, ranks)
            own = sum(forward[one + 1] - forward[one] + backward[one + 1] - backward[one] for one in held)
            more = sum(extra[one + 1] - extra[one] for one in held)
            first = min(held)
            ends = forward[first] + (0.0 if shape.halves else backward[first])
            alone = min(alone, batches * own + ends)
            ends += 0.0 if shape.halves else extra[first]
            busiest = max(busiest, batches * (own + more) + ends)
            computes, waits = computes + batches * (own + more) / ranks, waits + ends / ranks
        return RankTimes(alone, busiest, computes, waits, through)

    def _computed_before(self, analysis: Analysis) -> tuple[list[float], list[float], list[float]]:
        """Prefix sums of seconds over possible starts of stages: of forward, of backward, and of inputs' gradients."""
        count, places = len(split_points(analysis).starts), _places(analysis)
        forward, backward, inputs = ([0.0] * count for _ in range(3))
        for path, took in self.layers.once(analysis, self.layers.together).items():
            if path in places:
                forward[places[path]] += took.forward
                backward[places[path]] += took.backward
                inputs[places[path]] += took.of_inputs
        return _added_up(forward), _added_up(backward), _added_up(inputs)

    def _recomputed_before(self, analysis: Analysis) -> list[float]:
        """Prefix sums of seconds of recomputation over possible starts of stages."""
        again, places = [0.0] * len(split_points(analysis).starts), _places(analysis)
        for path, seconds in self.layers.once(analysis, self.again).items():
            if path in places:
                again[places[path]] += seconds
        return _added_up(again)

    def of_stages(
        self, analysis: Analysis, points: tuple[str, ...] | None, count: int, *, halves: bool
    ) -> Sequence[StageTime]:
        """Least seconds of each stage; the halves of backward are 0 where the program is traced.

        The first half computes the gradients of inputs: one product of each linear layer, and the backward of
        attention, which reads recomputed activations. The second half computes the gradients of weights: the other
        products, and another recomputation for them. The inputs of the first stage have no gradient: all of its
        backward is in its second half.

        Args:
            analysis: analysis of a plan whose mesh and batch are decided.
            points: the first module of each stage but the first; None where the plan has no stages.
            count: number of stages.
            halves: whether backward is split.
        """
        return self.layers.once(analysis, self._of_stages, points, count, halves)

    def _of_stages(
        self, analysis: Analysis, points: tuple[str, ...] | None, count: int, halves: bool
    ) -> Sequence[StageTime]:
        forward, backward, again, inputs, weights = ([0.0] * count for _ in range(5))
        at = [] if points is None else stages_between(analysis, points)
        stages = {path: at[place] for path, place in _places(analysis).items()} if at else {}
        recomputed = self.layers.once(analysis, self.again)
        halved = halves and not is_traced(analysis)
        for path, took in self.layers.once(analysis, self.layers.of_layers).items():
            stage = stages.get(path)
            if stage is not None:
                forward[stage] += took.forward
                backward[stage] += took.backward
                if halved:
                    (inputs if stage else weights)[stage] += took.of_inputs
                    weights[stage] += took.of_weights
        twice = by_second_half(analysis, recomputed) if halved else {}
        for path, seconds in recomputed.items():
            stage = stages.get(path)
            if stage is not None:
                more = twice.get(path, 0.0) if stage else 0.0
                again[stage] += seconds + more
                assert analysis.manifest is not None
                if halved and analysis.manifest.modules[path].kind != "linear":
                    (inputs if stage else weights)[stage] += seconds
                    weights[stage] += more
        return list(map(StageTime, forward, backward, again, inputs, weights))


def weights_of(split: object) -> dict[str, float]:
    """Weights of the embedding and the loss in an even split, in blocks; empty where the plan gives none."""
    return {"embedding": split.embedding, "loss": split.loss} if isinstance(split, Even) else {}


def _added_up(parts: Sequence[float]) -> list[float]:
    return [0.0, *itertools.accumulate(parts)]


@fact
def _places(analysis: Analysis) -> dict[str, int]:
    """For each module, the index of the possible start of a stage that contains it; modules outside have none."""
    assert analysis.manifest is not None
    known = split_points(analysis)
    starts = ((path, known.holder(path)) for path in analysis.manifest.modules)
    return {path: known.position[start] for path, start in starts if start is not None}
