"""Lower bound of what the open styles of a block on `tp` add to it, over all choices.

A layer that is replicated computes all of its product on every rank, and layers that are sharded communicate between
them. The choice counts that adds least to the layers' fastest local shapes
(:mod:`legoai.cost.search.lower_bounds.open_holes.blocks`). Nothing is added where a compiler or a graph pass orders the
collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from legoai.cost.machine.cluster import Machine
from legoai.cost.search.lower_bounds.activations import bytes_of_feature
from legoai.cost.search.lower_bounds.communication.collectives import seconds_on_tp
from legoai.cost.search.lower_bounds.local_kernels import AttentionShape, ExpertsShape, LinearShape, Pass
from legoai.cost.search.lower_bounds.open_holes.block_steps import Collective, Computed, Item, Left
from legoai.cost.search.lower_bounds.open_holes.blocks import names_parts, open_blocks
from legoai.cost.search.lower_bounds.open_holes.style_graph import StyleGraph
from legoai.cost.trace.records import CollectiveKind
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.computation.precision import computes_in_float8
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.specs.directives.checkpoint import Every, Full, KeepAll, Selective
from legoai.specs.directives.hole import Hole
from legoai.specs.dtypes import DTYPE_BYTES

Shape: TypeAlias = LinearShape | AttentionShape | ExpertsShape
Local: TypeAlias = Callable[[LinearShape | AttentionShape, int], Pass | None]
"""Least seconds of a layer on a rank, by its shape and the ranks that may share it; None where it is not known."""


class Added(NamedTuple):
    """Least seconds that a block takes more in forward, in backward, and in both."""

    forward: float = 0.0
    backward: float = 0.0
    both: float = 0.0

    @property
    def apart(self) -> Pass:
        """What is added to a forward and to a backward, each for itself."""
        return Pass(self.forward, self.backward)

    @property
    def together(self) -> Pass:
        """What is added to a forward, and with its backward to both."""
        return Pass(self.forward, self.both - self.forward)


@dataclass(slots=True)
class OpenStyles:
    """What open styles add to the blocks of one plan's candidates, each computed once."""

    _known: dict[tuple[object, ...], tuple[StyleGraph, Added]] = field(default_factory=dict)
    """With the graph that it was computed for, so that no other can have its identity."""

    def of_blocks(
        self,
        analysis: Analysis,
        machine: Machine,
        layers: Mapping[str, Shape],
        least: Mapping[str, Pass],
        local: Local,
    ) -> dict[str, Added]:
        """Least seconds that are added to each block in which styles are open, by its path.

        Args:
            analysis: of a plan whose mesh and micro batch are decided.
            machine: on which it runs.
            layers: shapes of layers.
            least: seconds of these that are known already.
            local: least seconds of layers.

        Raises:
            Undecided: it depends on a hole.
            ProfileError: nothing is known of the links.
        """
        plan = analysis.plan
        if plan.mesh.tp == 1 or plan.compile is not None or is_traced(analysis) or computes_in_float8(plan.precision):
            return {}
        beside = recomputed_beside(analysis)
        found, of_kinds = dict[str, Added](), dict[int, Added]()
        for path, block in open_blocks(analysis).items():
            place = id(block.graph)
            if place not in of_kinds:
                costs = StyleCosts(analysis, machine, layers, least, local, beside)
                of_kinds[place] = self._of_kind(block.graph, costs)
            found[path] = of_kinds[place]
        return found

    def _of_kind(self, graph: StyleGraph, costs: StyleCosts) -> Added:
        """What is added to each block of a kind."""
        plan, items = costs.analysis.plan, sorted(graph.items, key=repr)
        known = tuple(costs.least.get(item.path) for item in items if not isinstance(item, Collective))
        sizes = plan.mesh.tp, plan.mesh.cp, plan.batch.micro_batch, bytes_of_feature(costs.analysis)
        key = id(graph), id(costs.machine), *sizes, plan.precision.param, plan.precision.master, costs.beside, known
        if key not in self._known:
            self._known[key] = graph, costs.added(graph)
        return self._known[key][1]


@fact
def recomputed_beside(analysis: Analysis) -> frozenset[str]:
    """The collectives of backward beside which something may be computed again, by what begins with them.

    What a block was given is read, and so computed again, when the gradient of its last layer's output is on its way.
    Unless collectives may be kept, others are repeated then, for which the block waits, and which count nowhere else.
    Of several sequences torch puts the pieces together, for which it waits at once.
    """
    checkpoint = analysis.plan.checkpoint
    if checkpoint is None or analysis.plan.batch.micro_batch > 1:
        return frozenset()
    if names_parts(analysis, checkpoint):
        return frozenset({"block", "layer"})
    repeat = all(_repeats_collectives(rule.treatment) for rule in checkpoint.rules)
    return frozenset() if repeat else frozenset({"block"})


def _repeats_collectives(treatment: object) -> bool:
    """Whether what is computed again surely repeats its collectives."""
    if isinstance(treatment, Hole):
        return treatment.domain is not None and all(map(_repeats_collectives, treatment.domain))
    if isinstance(treatment, Selective):
        kept: object = treatment.keep
        return not isinstance(kept, Hole) and {"attention", "matmul", "alternate_matmul"}.issuperset(treatment.keep)
    return isinstance(treatment, Full | Every | KeepAll)


@dataclass(frozen=True, slots=True)
class StyleCosts:
    """Seconds of what is done under a style.

    Attributes:
        analysis: of the plan.
        machine: on which it runs.
        layers: shapes of the layers of a block.
        least: seconds of these that are known already.
        local: least seconds of layers.
        beside: beside which collectives something may be computed again, as :func:`recomputed_beside` has it.
    """

    analysis: Analysis
    machine: Machine
    layers: Mapping[str, Shape]
    least: Mapping[str, Pass]
    local: Local

    beside: frozenset[str] = frozenset()

    def added(self, graph: StyleGraph) -> Added:
        """What the way adds to a block that adds least."""
        took = {item: self.took(item) for item in graph.items}
        forward, backward, both = (
            graph.least({item: seconds[place] for item, seconds in took.items()}) for place in range(3)
        )
        return Added(forward, backward, max(both, forward + backward))

    def took(self, item: Item) -> Added:
        """Seconds that one of the things takes which are done on a way."""
        if isinstance(item, Left):
            return self._left(item)
        if isinstance(item, Computed):
            return self._computed(item)
        seconds = 0.0 if item.begins in self.beside else self._seconds(item.kind, item.features)
        return Added(seconds, 0.0, seconds) if item.phase == "forward" else Added(0.0, seconds, seconds)

    def _seconds(self, kind: CollectiveKind, features: int) -> float:
        return seconds_on_tp(self.analysis, self.machine, kind, bytes_of_feature(self.analysis) * features)

    def _computed(self, item: Computed) -> Added:
        """How much longer a layer takes than at its fastest shape."""
        shape, least, parts = self.layers.get(item.path), self.least.get(item.path), self.analysis.plan.mesh.tp
        if shape is None or least is None or isinstance(shape, ExpertsShape):
            return Added()
        if isinstance(shape, LinearShape) and item.cut != "none":
            rows, columns = shape
            if (rows if item.cut == "rows" else columns) % parts:
                return Added()  # some rank has less
            shape = LinearShape(rows // parts, columns) if item.cut == "rows" else LinearShape(rows, columns // parts)
        found = self.local(shape, 1)
        if found is None:
            return Added()
        forward, backward = max(0.0, found.forward - least.forward), max(0.0, found.backward - least.backward)
        return Added(forward, backward, forward + backward)

    def _left(self, item: Left) -> Added:
        """What a layer waits for whose tensors PyTorch brings together as it likes.

        Forward gathers the input, or the weight, or sums up the outputs of pieces. Backward reads the input as it
        arrived, and the gradient of the output as that left: where a layer is cut by rows, one of them is gathered or
        cut otherwise for the gradient of the weight.
        """
        shape, plan = self.layers.get(item.path), self.analysis.plan
        if not isinstance(shape, LinearShape):
            return Added()
        weight = shape.rows * shape.columns * min(DTYPE_BYTES[plan.precision.param], DTYPE_BYTES[plan.precision.master])
        of_weight = seconds_on_tp(self.analysis, self.machine, "all_gather", weight)
        of_input = self._seconds("all_gather", shape.columns)
        summed = self._seconds("reduce_scatter", shape.rows) if item.is_waited_for else 0.0
        if item.cut == "columns":
            forward = min(of_input, of_weight, summed)
            return Added(forward, 0.0, forward)
        turned = seconds_on_tp(
            self.analysis, self.machine, "all_to_all", bytes_of_feature(self.analysis) * shape.rows / plan.mesh.tp
        )
        out, back = (turned if item.is_waited_for else 0.0, turned) if item.by_features else (0.0, 0.0)
        ways = (of_input, min(of_input, turned)), (of_weight + out, back), (summed, 0.0)
        forward, backward = (min(one) for one in zip(*ways, strict=True))
        return Added(forward, backward, min(map(sum, ways)))
