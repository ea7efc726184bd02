"""Lower bounds of a candidate's step time and memory that need no simulation.

Each is admissible: no simulation of the candidate, nor of any plan that the holes left in it may become, gives less.
Where a bound depends on a hole, that part of it is 0.

Time. Kernels of one rank run one after another, and no product is faster than the fastest rate that its profile can
give (:func:`fastest_rate`). All ranks together do at least the products that the model asks for: of each linear layer
one in forward and two in backward for each token, attention's once in forward and twice in backward, and once more what
is recomputed. A rank does at least its share of its stages' products, since what is not sharded is done by each rank
again. Where mesh and micro batch are decided, a layer takes no less than at the fastest of the shapes that it may have
on a rank (:mod:`legoai.cost.search.local_kernels`), and all layers no less than those of a candidate that was simulated
and has the same (:mod:`legoai.cost.search.shared_work`). In a pipeline a rank begins when the first micro batch has
passed the stages before its own, and the step ends when the last has gone back through them.

Memory. Parameters, gradients and optimizer state in shards (:func:`legoai.dsl.analysis.state.state_bytes`); or, when
the backward of a micro batch begins, parameters and optimizer state with what the blocks keep
(:mod:`legoai.cost.search.activations`) and the logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from legoai.cost.kernels.model_flops import DECODERS
from legoai.cost.machine.cluster import Machine, machine_of
from legoai.cost.profiles import AttentionModel, ProductModel, Profile
from legoai.cost.search.activations import kept_by_blocks
from legoai.cost.search.local_kernels import AttentionShape, LinearShape, LocalKernels, Pass
from legoai.cost.search.shared_work import SharedWork
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import local_tokens, micro_batches
from legoai.dsl.analysis.bounds import logits_bytes
from legoai.dsl.analysis.checkpoint import recomputed_modules
from legoai.dsl.analysis.facts import below, holders
from legoai.dsl.analysis.pipeline import is_staged, splits_backward, stage_count, stage_of, stages_of_ranks
from legoai.dsl.analysis.state import state_bytes
from legoai.specs.directives.checkpoint import Every, Full
from legoai.specs.directives.hole import Undecided
from legoai.specs.directives.loss import EagerLoss
from legoai.specs.directives.model import FOREIGN
from legoai.specs.directives.pipeline import OrderFile
from legoai.specs.directives.precision import Float8, MxFp8
from legoai.specs.models.manifest import Manifest
from legoai.specs.models.reads import Tokens

_FACTORS: Final = 2
"""Products in the backward of a product: one for each factor."""

Layer: TypeAlias = tuple[str, LinearShape | AttentionShape]
"""Path of a layer, and its shape on one device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """No simulation gives less: seconds of a step, and bytes of active memory on the fullest rank."""

    step_time: float = 0.0
    memory: float = 0.0


@dataclass(slots=True)
class BoundsOf:
    """Bounds of the candidates of one plan.

    Args:
        profile: of other devices than the plan's.

    Attributes:
        shared: what is known from candidates that were simulated.
    """

    profile: str | None = None
    shared: SharedWork = field(default_factory=SharedWork)
    _machines: dict[str, Machine] = field(default_factory=dict)
    _layers: tuple[Manifest, list[Layer]] | None = None
    _kernels: dict[tuple[int, frozenset[str], str], LocalKernels] = field(default_factory=dict)

    def machine(self, analysis: Analysis) -> Machine:
        """The machine of a candidate whose cluster is decided.

        Raises:
            Undecided: the cluster is a hole.
            ProfileError: a profile that is not there or not readable.
            CatalogueError: a device that is not known or not complete.
        """
        use = analysis.plan.cluster
        key = f"{use.device} {use.profile} {use.hosts} {use.devices} {use.fabric}"
        if key not in self._machines:
            self._machines[key] = machine_of(use, 1, directory=analysis.directory, override=self.profile)
        return self._machines[key]

    def __call__(self, analysis: Analysis) -> Bounds:
        """The bounds of a candidate, which may have holes.

        Raises:
            ProfileError: a profile that is not there or not readable.
            CatalogueError: a device that is not known or not complete.
        """
        try:
            seconds = self._seconds(analysis)
        except Undecided:
            seconds = 0.0
        return Bounds(
            step_time=max(seconds, self.shared.seconds(analysis, 0.0)),
            memory=_memory(analysis, self.shared.activations(analysis)),
        )

    def _seconds(self, analysis: Analysis) -> float:
        plan, manifest = analysis.plan, analysis.manifest
        if manifest is None or plan.model.family in FOREIGN or not isinstance(manifest.reads, Tokens):
            return 0.0
        linear, attention = _rates(analysis, self.machine(analysis).profile)
        if not linear:
            return 0.0
        held, layers = self._layers or (None, [])
        if held is not manifest:
            layers = list(_layers(manifest, decoder=plan.model.family in DECODERS))
            self._layers = manifest, layers
        length = plan.batch.length
        fused = plan.attention.kernel != "flex"
        # The mask leaves half of 4 H Q T.
        of_token = {
            path: 2 * shape.heads * shape.width * length / attention
            if isinstance(shape, AttentionShape)
            else 2 * shape.rows * shape.columns / linear
            for path, shape in layers
            if fused or isinstance(shape, LinearShape)
        }
        fastest = {path: Pass(took, _FACTORS * took) for path, took in of_token.items()}
        tokens = plan.batch.global_batch * length
        everything = _added(analysis, fastest) * tokens / plan.mesh.world_size
        try:
            return max(everything, self._on_rank(analysis, layers, of_token))
        except Undecided:
            return everything

    def _on_rank(self, analysis: Analysis, layers: Sequence[Layer], of_token: Mapping[str, float]) -> float:
        """Seconds of the busiest rank of a plan whose mesh and micro batch are decided."""
        plan = analysis.plan
        batches = micro_batches(plan)
        if batches is None:
            return 0.0
        mesh = plan.mesh
        tokens = plan.batch.micro_batch * plan.batch.length / (mesh.cp * mesh.tp)
        least = {path: Pass(took * tokens, _FACTORS * took * tokens) for path, took in of_token.items()}
        least |= self._at_shapes(analysis, [item for item in layers if item[0] in of_token], least)
        everything = _added(analysis, least) * batches / mesh.pp
        everything = max(everything, self.shared.seconds(analysis, sum(_recomputed(analysis, least).values())))
        staged = plan.pipeline is not None and is_staged(analysis) and not isinstance(plan.pipeline.schedule, OrderFile)
        return max(everything, _pipelined(analysis, least)) if staged else everything

    def _at_shapes(
        self, analysis: Analysis, layers: Sequence[Layer], least: Mapping[str, Pass]
    ) -> Iterator[tuple[str, Pass]]:
        """Layers of which more is known than the fastest rate: their shapes on a rank."""
        plan, manifest = analysis.plan, analysis.manifest
        assert manifest is not None
        tp, cp = plan.mesh.tp, plan.mesh.cp
        if plan.batch.length % cp or any(isinstance(rule.treatment, Float8 | MxFp8) for rule in plan.precision.rules):
            return
        machine = self.machine(analysis)
        rates = frozenset({plan.precision.param, plan.precision.master})
        kernel = plan.attention.kernel
        kernels = self._kernels.setdefault((id(machine), rates, kernel), LocalKernels(machine.profile, rates, kernel))
        whole_loss = isinstance(plan.loss.form, EagerLoss)
        for path, shape in layers:
            if isinstance(shape, AttentionShape):
                found = kernels.attention(shape, plan.batch.micro_batch, plan.batch.length, tp) if cp == 1 else None
            elif whole_loss or any(below(path, item.path) for item in manifest.block_lists):
                found = kernels.linear(shape, local_tokens(plan), tp)
            else:
                found = None  # a loss in pieces takes the output layer with it
            if found is not None:
                known = least[path]
                yield path, Pass(max(found.forward, known.forward), max(found.backward, known.backward))


def fastest_rate(model: ProductModel | AttentionModel) -> float:
    """The most floating-point operations per second that a model gives any product or attention.

    Under a power limit the sustained rate is a limit by itself. Else the formula's best rate counts, times the most
    that a measurement or a leaf of the forest lifts it: what is interpolated lies between them.
    """
    curve = model.curve
    ratios = [*(model.table.ratios if model.table is not None else ())]
    if model.forest is not None:
        ratios += [value for value, at in zip(model.forest.value, model.forest.feature, strict=True) if at < 0]
    lifted = model.scale * math.exp(min([0.0, *ratios]))
    if isinstance(model, AttentionModel):
        return curve.peak * max(limit for limit, *_ in model.curve.limits.values()) / lifted
    if model.curve.sustained is not None:
        return curve.peak * model.curve.sustained
    return curve.peak * model.curve.efficiency * max(rate for *_, rate in model.curve.tiles) / lifted


def _rates(analysis: Analysis, profile: Profile) -> tuple[float, float]:
    """The fastest rates of linear layers and of attention, whatever the dtype of a part of them."""
    precision = analysis.plan.precision
    names = {precision.param, precision.master}
    if "fp32" in names:
        names.add("tf32")
    if any(isinstance(rule.treatment, Float8 | MxFp8) for rule in precision.rules):
        names |= {"fp8", "mxfp8"}
    products = max((fastest_rate(model) for name, model in profile.products.items() if name in names), default=0.0)
    fused = [fastest_rate(model) for (_, _, name), model in profile.attention.items() if name in names]
    return products, max([products, *fused])


def _layers(manifest: Manifest, *, decoder: bool) -> Iterator[Layer]:
    """Linear layers, and the attention of a decoder, with their shapes."""
    for path, module in manifest.modules.items():
        if module.kind == "linear":
            for weight in module.parameters:
                if len(weight.shape) == 2:
                    yield path, LinearShape(*weight.shape)
        elif module.kind == "attention" and decoder:
            heads, width = int(module.attributes["n_heads"]), int(module.attributes["head_dim"])
            yield path, AttentionShape(heads, int(module.attributes.get("n_kv_heads", heads)), width)


def _added(analysis: Analysis, least: Mapping[str, Pass]) -> float:
    """Seconds of all layers in forward, backward and recomputation."""
    return sum(one.forward + one.backward for one in least.values()) + sum(_recomputed(analysis, least).values())


def _recomputed(analysis: Analysis, least: Mapping[str, Pass]) -> dict[str, float]:
    """Least seconds of recomputation, by the recomputing module.

    torch stops to recompute when all that was saved is there again, so that the last product of a module may be left
    out: the largest counts as that one. Compiled modules choose by themselves what they recompute.
    """
    if analysis.plan.compile is not None:
        return {}
    try:
        rules = recomputed_modules(analysis)
    except Undecided:
        return {}
    whole = {path for path, rule in rules.items() if isinstance(rule.treatment, Full | Every)}
    inside: dict[str, list[float]] = {}
    for path, took in least.items():
        outermost = [holder for holder in holders(path) if holder in whole][-1:]
        for holder in outermost:
            inside.setdefault(holder, []).append(took.forward)
    return {path: max(0.0, sum(parts) - max(parts)) for path, parts in inside.items()}


def _pipelined(analysis: Analysis, least: Mapping[str, Pass]) -> float:
    """The busiest rank's own work, after the first micro batch has come to it and before the last has gone back."""
    count, batches = stage_count(analysis), micro_batches(analysis.plan)
    if count is None or batches is None:
        return 0.0
    forward, backward = [0.0] * count, [0.0] * count
    for path, took in least.items():
        stage = stage_of(analysis, path)
        if stage is not None:
            forward[stage] += took.forward
            backward[stage] += took.backward
    for path, again in _recomputed(analysis, least).items():
        stage = stage_of(analysis, path)
        if stage is not None:
            backward[stage] += again
    split = splits_backward(analysis)
    longest = 0.0
    for stages in stages_of_ranks(analysis):
        own = sum(forward[stage] + backward[stage] for stage in stages) * batches
        before = range(min(stages))
        fill = sum(forward[stage] for stage in before)
        drain = 0.0 if split else sum(backward[stage] for stage in before)
        longest = max(longest, own + fill + drain)
    return longest


def _memory(analysis: Analysis, activations: int) -> float:
    try:
        state = state_bytes(analysis)
    except Undecided:
        return 0.0
    if state is None:
        return 0.0
    try:
        live = state.parameters + state.optimizer + max(activations, _activations(analysis))
    except Undecided:
        live = 0
    return max(state.total, live)


def _activations(analysis: Analysis) -> int:
    """Least bytes of what one micro batch leaves for its backward, on the fullest rank."""
    logits = (logits_bytes(analysis) or 0) if analysis.plan.mesh.pp == 1 else 0
    return logits + kept_by_blocks(analysis)
