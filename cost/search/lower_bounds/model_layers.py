"""Lower bound of the time of all layers of a model on one rank, by what is decided of a candidate.

Without degrees a layer takes no less than at the profile's fastest rate; with them, than at the fastest of its possible
local shapes, with what it waits for on `tp`, and with the memory-bound kernels of its block where these were observed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar, TypeVarTuple

from legoai.cost.machine.cluster import Machine
from legoai.cost.search.lower_bounds import memory_bound_kernels
from legoai.cost.search.lower_bounds.attention_pieces import pieces_of_ranks
from legoai.cost.search.lower_bounds.communication import collectives
from legoai.cost.search.lower_bounds.layers import Layer, layers_of, rates_of
from legoai.cost.search.lower_bounds.local_kernels import (
    AttentionShape,
    ExpertsShape,
    LinearShape,
    LocalKernels,
    Pass,
    least_of,
)
from legoai.cost.search.lower_bounds.memory_bound_kernels import Moved, MovedSeconds
from legoai.cost.search.lower_bounds.observed.blocks import ObservedBlocks
from legoai.cost.search.lower_bounds.observed.steady_blocks import SteadyBlocks
from legoai.cost.search.lower_bounds.open_holes.blocks import has_open_styles
from legoai.cost.search.lower_bounds.open_holes.styles import Added, OpenStyles
from legoai.cost.search.lower_bounds.sharded_layers import layers_of_pieces
from legoai.cost.search.lower_bounds.shared_work import MicroBatchWork
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import local_tokens
from legoai.dsl.analysis.computation.attention import possible_kernels
from legoai.dsl.analysis.computation.precision import computes_in_float8
from legoai.dsl.analysis.facts import modules_inside
from legoai.dsl.analysis.parallelism.context import parts_of_heads
from legoai.dsl.analysis.parallelism.experts import limited_experts
from legoai.dsl.analysis.training.loss import layer_of_logits, pieces_of_last_layer, takes_last_layer
from legoai.specs.directives.hole import Hole, Undecided
from legoai.specs.directives.model import FOREIGN
from legoai.specs.models.manifests.manifest import Manifest

T = TypeVar("T")
Values = TypeVarTuple("Values")

FACTORS: Final = 2
"""Products in the backward of a product: one for each factor."""
_NOTHING: Final = Pass(0.0, 0.0)


class _OfRank(Protocol):
    """Least seconds of a layer on a rank, which may share it with others, in pieces of the tokens."""

    def __call__(self, shape: LinearShape | AttentionShape, parts: int, pieces: int = 1) -> Pass | None: ...


@dataclass(slots=True)
class ModelLayers:
    """Least seconds of layers in the candidates of one plan.

    Args:
        machine: of a candidate whose cluster is decided.
        steady: what steady blocks were observed to add in other candidates.

    Attributes:
        own: identity of this object's results in the caches of analyses.
        observed: what blocks were observed to compute in other candidates.
    """

    machine: Callable[[Analysis], Machine]
    steady: SteadyBlocks
    own: object = field(default_factory=object)
    _layers: tuple[Manifest, list[Layer]] | None = None
    _kernels: dict[tuple[int, frozenset[str], frozenset[str]], LocalKernels] = field(default_factory=dict)
    observed: ObservedBlocks = field(default_factory=ObservedBlocks)
    _styles: OpenStyles = field(default_factory=OpenStyles)
    _moved: dict[str, Sequence[Moved]] = field(default_factory=dict)

    def observe(self, analysis: Analysis, moved: Sequence[Moved], work: MicroBatchWork, released: float) -> None:
        """Note what the blocks of a simulated candidate moved, computed and kept."""
        key = memory_bound_kernels.key_of(analysis) if moved else None
        if key is not None and key not in self._moved:
            self._moved[key] = moved
            self.own = object()  # what was computed without it is no longer the most that is known
        self.observed.observe(analysis, work, released)
        self.observed.revision += self.steady.observe(analysis, work)

    def once(self, analysis: Analysis, compute: Callable[[Analysis, *Values], T], *values: *Values) -> T:
        """What a method gives that reads nothing but the plan, computed once for all candidates that it reads alike.

        Args:
            analysis: of the plan.
            compute: the method.
            values: what it takes besides.
        """
        version = self.observed.version(analysis)
        known = self.own, version, self.steady.revisions[version[0]]
        return analysis.once((known, compute.__qualname__, *values), lambda: compute(analysis, *values))

    def _layers_of(self, manifest: Manifest, family: str) -> list[Layer]:
        held, layers = self._layers or (None, [])
        if held is not manifest:
            layers = list(layers_of(manifest, family))
            self._layers = manifest, layers
        return layers

    def of_token(self, analysis: Analysis) -> dict[str, float]:
        """Least seconds of the forward of one token in each layer; none where nothing is known."""
        plan, manifest = analysis.plan, analysis.manifest
        if manifest is None or not manifest.reads_tokens:
            return {}
        linear, attention = rates_of(analysis, self.machine(analysis).profile)
        if not linear:
            return {}
        length = plan.batch.length
        fused = "flex" not in possible_kernels(analysis)
        found = {}
        for path, shape in self._layers_of(manifest, plan.model.family):
            if isinstance(shape, LinearShape):
                found[path] = 2 * shape.rows * shape.columns / linear
            elif isinstance(shape, ExpertsShape):
                if _takes_all(analysis, path):
                    found[path] = 2 * shape.elements / linear
            elif fused:
                widths = shape.width + shape.value_width
                found[path] = shape.heads * widths * length / attention  # the mask leaves half of 4 H Q T
        return found

    def of_layers(self, analysis: Analysis) -> Mapping[str, Pass]:
        """Least seconds of each layer for one micro batch on a rank; mesh and micro batch must be decided."""
        return self._with_styles(analysis, together=analysis.plan.mesh.pp == 1)

    def together(self, analysis: Analysis) -> Mapping[str, Pass]:
        """The same, where the least of a forward and a backward together may be more than the least of each.

        What is more is with the backward: it is for sums in which no backward counts more often than its forward, which
        are all of those without a pipeline.
        """
        return self._with_styles(analysis, together=True)

    def _with_styles(self, analysis: Analysis, *, together: bool) -> Mapping[str, Pass]:
        alone, styles = self.once(analysis, self._of_layers), self.once(analysis, self.of_styles)
        added = functools.cache(lambda took, one: _waited(took, one.together if together else one.apart))
        return {**alone, **{path: added(alone.get(path, _NOTHING), one) for path, one in styles.items()}}

    def of_styles(self, analysis: Analysis) -> dict[str, Added]:
        """Least seconds that open styles add to each block; mesh and micro batch must be decided."""
        manifest = analysis.manifest
        try:
            local = self.once(analysis, self._local) if has_open_styles(analysis) else None
            if local is None or manifest is None or analysis.plan.model.family in FOREIGN:
                return {}
            layers = dict(self._layers_of(manifest, analysis.plan.model.family))
            least = self.once(analysis, self._of_layers)
            if not least:
                return {}
            return self._styles.of_blocks(analysis, self.machine(analysis), layers, least, local)
        except Undecided:
            return {}

    def _of_layers(self, analysis: Analysis) -> Mapping[str, Pass]:
        """The same without what open styles add."""
        plan, manifest, of_token = analysis.plan, analysis.manifest, self.once(analysis, self.of_token)
        assert manifest is not None
        least = self._by_shapes(analysis, manifest, of_token) if of_token else {}
        if plan.model.family not in FOREIGN:  # another layer may compute while one waits
            waited = functools.cache(_waited)
            for path, waits in self.once(analysis, self.waits).items():
                least[path] = waited(least[path], waits)
        beside = self._beside_layers(analysis, least)
        if beside is not None:
            least |= dict.fromkeys(memory_bound_kernels.repeated_blocks(manifest), beside)
        return least

    def _by_shapes(self, analysis: Analysis, manifest: Manifest, of_token: Mapping[str, float]) -> dict[str, Pass]:
        """Least seconds of layers by themselves."""
        plan = analysis.plan
        tokens = plan.batch.micro_batch * plan.batch.length / (plan.mesh.cp * plan.mesh.tp)
        # Equal layers share what is computed for one.
        at_rate = {took: Pass(took * tokens, FACTORS * took * tokens) for took in set(of_token.values())}
        least = {path: at_rate[took] for path, took in of_token.items()}
        layers = self._layers_of(manifest, plan.model.family)
        return least | dict(self._at_shapes(analysis, [item for item in layers if item[0] in of_token], least))

    def _beside_layers(self, analysis: Analysis, least: Mapping[str, Pass]) -> Pass | None:
        """Least seconds of each block beside those of its layers; None where nothing is known of it."""
        moved, seen = self.once(analysis, self.moved), self.observed.of(analysis)
        found = None if moved is None else moved.once
        if seen is None:
            return found
        assert analysis.manifest is not None
        last, waits = memory_bound_kernels.repeated_blocks(analysis.manifest)[-1], self.once(analysis, self.waits)
        inside = {path: least[path] for path in modules_inside(analysis, last) if path in least}
        forward = seen.forward - sum(took.forward for took in inside.values())
        # Which collectives of backward are waited for was not observed.
        backward = seen.backward - sum(
            took.backward - (waits[path].backward if path in waits else 0.0) for path, took in inside.items()
        )
        found = Pass(0.0, 0.0) if found is None else found
        return found._replace(forward=max(found.forward, forward), backward=max(found.backward, backward))

    def moved(self, analysis: Analysis) -> MovedSeconds | None:
        """Least seconds of what each block moves, and moves again where it is recomputed; None where it is not known.

        Mesh and micro batch must be decided.
        """
        key = self.once(analysis, self._movement_key) if self._moved else None
        if key not in self._moved:
            return None
        return memory_bound_kernels.seconds_of_block(self._moved[key], analysis, self.machine(analysis).profile)

    def _movement_key(self, analysis: Analysis) -> str | None:
        try:
            return memory_bound_kernels.key_of(analysis)
        except Undecided:
            return None

    def waits(self, analysis: Analysis) -> dict[str, Pass]:
        """Least seconds for which each layer waits for collectives."""
        try:
            return collectives.of_layers(analysis, self.machine(analysis))
        except Undecided:
            return {}

    def _local(self, analysis: Analysis) -> _OfRank | None:
        """Least seconds of layers on a rank; None where not known."""
        plan = analysis.plan
        if computes_in_float8(plan.precision) or plan.batch.length % plan.mesh.cp:
            return None
        machine = self.machine(analysis)
        key = id(machine), frozenset({plan.precision.param, plan.precision.master}), possible_kernels(analysis)
        kernels = self._kernels.setdefault(key, LocalKernels(machine.profile, *key[1:]))
        tokens, sequences, of_ranks = local_tokens(plan), plan.batch.micro_batch, self.once(analysis, pieces_of_ranks)
        others = parts_of_heads(plan) // plan.mesh.tp

        def seconds(shape: LinearShape | AttentionShape, parts: int, pieces: int = 1) -> Pass | None:
            if isinstance(shape, LinearShape):
                of_piece = kernels.linear(shape, tokens // pieces, parts)
                return None if of_piece is None or tokens % pieces else Pass(*(pieces * one for one in of_piece))
            of_rank = [kernels.attention(shape, sequences, own, others * parts) for own in of_ranks]
            return least_of([one for one in of_rank if one is not None])

        return seconds

    def _at_shapes(
        self, analysis: Analysis, layers: Sequence[Layer], least: Mapping[str, Pass]
    ) -> Iterator[tuple[str, Pass]]:
        """Layers of which more is known than the fastest rate: their shapes on a rank."""
        plan, manifest, local = analysis.plan, analysis.manifest, self.once(analysis, self._local)
        assert manifest is not None
        if local is None:
            return
        elsewhere = layers_of_pieces(analysis)
        known_at = [item for item in layers if not isinstance(item[1], ExpertsShape) and item[0] not in elsewhere]
        pieces_of = _pieces_of_last_layer(analysis)

        @functools.cache
        def raised(shape: LinearShape | AttentionShape, known: Pass, pieces: int) -> Pass | None:
            found = local(shape, plan.mesh.tp, pieces)
            if found is None:
                return None
            most = max(found.forward, known.forward), max(found.backward, known.backward)
            return Pass(*most, found.of_inputs, found.of_weights)

        for path, shape in known_at:
            pieces = pieces_of.get(path, 1)
            found = raised(shape, least[path], pieces) if pieces else None
            if found is not None:
                yield path, found


def _pieces_of_last_layer(analysis: Analysis) -> dict[str, int]:
    """The pieces in which the loss computes the last layer, by its path; 0 where that is not decided."""
    form = analysis.plan.loss.form
    layer = layer_of_logits(analysis.manifest) if takes_last_layer(form) and analysis.manifest is not None else None
    if layer is None:
        return {}
    try:
        return {layer: 0 if isinstance(form, Hole) else pieces_of_last_layer(form)}
    except Undecided:
        return {layer: 0}


def _waited(took: Pass, waits: Pass) -> Pass:
    """A layer with the seconds for which it waits."""
    return took._replace(forward=took.forward + waits.forward, backward=took.backward + waits.backward)


def _takes_all(analysis: Analysis, experts: str) -> bool:
    """Whether some experts take all tokens that are routed to them, for all that is decided."""
    try:
        return experts not in limited_experts(analysis)
    except Undecided:
        return False
