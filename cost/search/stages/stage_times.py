"""Lower bound of the time of pipeline stages, shared by candidates with the same layers and the same split.

A schedule decides how many stages there are, and which of them a rank holds. What is computed here is computed once for
each way to split the model and each number of micro batches, whatever else is open or differs.
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
from legoai.dsl.analysis.fact import fact
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.stages.pipeline import split_points, stages_between
from legoai.specs.directives.pipeline import MULTI_STAGE, SINGLE_STAGE, SPLIT_BACKWARD, V_SHAPED, Even


class Shape(NamedTuple):
    """What a schedule of torch decides, whatever the order of its actions is.

    Attributes:
        stages: their number.
        v_shaped: whether ranks hold them in a V, else in turn.
        halves: whether a backward is in halves.
        in_turn: whether a rank takes one of its stages after the other.
    """

    stages: int
    v_shaped: bool
    halves: bool
    in_turn: bool


def shape_of(schedule: str, ranks: int, stages: int | None) -> Shape:
    """The shape of a schedule by its name; ``stages`` is their number where the plan says it."""
    assert schedule in SINGLE_STAGE + MULTI_STAGE
    count = stages if stages is not None else ranks * (1 if schedule in SINGLE_STAGE else 2)
    return Shape(count, schedule in V_SHAPED, schedule in SPLIT_BACKWARD, schedule == "LoopedBFS")


class RankTimes(NamedTuple):
    """Least seconds of the ranks of a pipeline with an even split, whatever the order of its actions is.

    Attributes:
        alone: of the least busy rank, if nothing is recomputed.
        busiest: of the busiest one.
        computes: in which a mean rank computes.
        waits: in which a mean rank does not, before its first micro batch and behind its last.
        through: of a micro batch that passes all stages forth and back.
    """

    alone: float
    busiest: float
    computes: float
    waits: float
    through: float


class StageTime(NamedTuple):
    """Least seconds of a stage for one micro batch; of the halves of its backward, if that is taken apart."""

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
        """Of a pipeline with an even split under any schedule of a shape.

        Raises:
            Undecided: the split, or a layer's time, depends on a hole.
        """
        # The ranks that one of their stages follows another of make no difference here.
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
        if shape.halves:  # the gradients of most weights come behind, whose half is known of eager programs only
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
        """Seconds of all that comes before each start of a stage: of forward, of backward, and of inputs' gradients."""
        count, places = len(split_points(analysis).starts), _places(analysis)
        forward, backward, inputs = ([0.0] * count for _ in range(3))
        for path, took in self.layers.once(analysis, self.layers.together).items():
            if path in places:
                forward[places[path]] += took.forward
                backward[places[path]] += took.backward
                inputs[places[path]] += took.of_inputs
        return _added_up(forward), _added_up(backward), _added_up(inputs)

    def _recomputed_before(self, analysis: Analysis) -> list[float]:
        """Seconds of all that is recomputed of what comes before each start of a stage."""
        again, places = [0.0] * len(split_points(analysis).starts), _places(analysis)
        for path, seconds in self.layers.once(analysis, self.again).items():
            if path in places:
                again[places[path]] += seconds
        return _added_up(again)

    def of_stages(
        self, analysis: Analysis, points: tuple[str, ...] | None, count: int, *, halves: bool
    ) -> Sequence[StageTime]:
        """Of each of some stages; of the halves of a backward nothing is known where the program is traced.

        The gradients of a stage's inputs take a product of each linear layer and all of attention, which reads what was
        recomputed; the gradients of weights take the other product, and what is recomputed again for them. The first
        stage has no inputs with a gradient: all of its backward is in its second half.

        Args:
            analysis: of a plan whose mesh and batch are decided.
            points: the first modules of the stages but the first; None where the plan makes none.
            count: of stages.
            halves: whether a backward is in halves.
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
    """What the first and the last stage compute beside their blocks, in blocks, as far as an even split says it."""
    return {"embedding": split.embedding, "loss": split.loss} if isinstance(split, Even) else {}


def _added_up(parts: Sequence[float]) -> list[float]:
    return [0.0, *itertools.accumulate(parts)]


@fact
def _places(analysis: Analysis) -> dict[str, int]:
    """The place of each module among those with which a stage can begin; none of what is around them."""
    assert analysis.manifest is not None
    known = split_points(analysis)
    starts = ((path, known.holder(path)) for path in analysis.manifest.modules)
    return {path: known.position[start] for path, start in starts if start is not None}
