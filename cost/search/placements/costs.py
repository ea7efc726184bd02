"""Seconds and bytes of one micro batch's work on one rank of `tp`, by the styles of the modules.

Kernels have the predicted time at the rank's local shapes; changes of layout have the time of the collectives that
`torch.distributed.tensor` issues, in forward and for the gradient in backward. Operations between modules read and
write their tensors once. Parameters cost the optimizer's pass over their local part, divided by the micro batches, so
that a replicated layer costs time as well as memory. All communication is assumed to be exposed, as in a program that
does not overlap it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from legoai.cost.kernels.kinds import Movement, MovementForm, MovementKind
from legoai.cost.machine.cluster import Machine
from legoai.cost.machine.kernel_time import seconds_of
from legoai.cost.search.lower_bounds.communication.collectives import seconds_on_tp
from legoai.cost.search.lower_bounds.local_kernels import (
    AttentionPiece,
    AttentionShape,
    LinearShape,
    LocalKernels,
    Pass,
)
from legoai.cost.search.lower_bounds.open_holes.block_steps import layout_wanted
from legoai.cost.trace.records import CollectiveKind
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import local_tokens, micro_batches
from legoai.dsl.analysis.computation.attention import possible_kernels
from legoai.dsl.analysis.computation.checkpoint import recomputed_modules
from legoai.dsl.analysis.facts import holders
from legoai.dsl.analysis.layouts.tensors import Tensor, as_list
from legoai.dsl.analysis.magnitudes.state import element_bytes
from legoai.dsl.analysis.magnitudes.trained import untrained_parameters
from legoai.dsl.analysis.parallelism.mesh import shard_ranks
from legoai.dsl.analysis.parallelism.overlap import overlaps
from legoai.specs.directives.checkpoint import Every, Full
from legoai.specs.directives.layouts import Layout, Partial, Replicated, Sharded
from legoai.specs.directives.shard import Colwise, Inputs, Outputs, Rowwise
from legoai.specs.dtypes import DTYPE_BYTES
from legoai.specs.models.manifests.manifest import ModuleInfo

_NORM_PASSES: Final = Pass(4, 6)
"""Reads and writes of a norm's tensor: two passes in forward, three with the gradient in backward."""
_LOSS_PASSES: Final = Pass(6, 4)
"""Reads and writes of the fp32 logits by the loss: cast, maximum and sum, difference; in backward their gradients."""
_OPTIMIZER_PASSES: Final = 7
"""Reads and writes of Adam per parameter: four tensors are read and three written."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds per micro batch, of forward, backward and recomputation, and bytes held on the device."""

    seconds: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.bytes + other.bytes)


class PlacementCosts:
    """Costs of styles under a plan whose mesh and micro batch are decided.

    Args:
        analysis: analysis of the plan; its styles may be open.
        machine: the machine that it runs on.

    Raises:
        Undecided: the costs depend on a hole.
    """

    def __init__(self, analysis: Analysis, machine: Machine) -> None:
        plan = analysis.plan
        self.analysis = analysis
        self.ranks = plan.mesh.tp
        self.tokens = local_tokens(plan)
        self.sequences = plan.batch.micro_batch
        self.length = plan.batch.length // plan.mesh.cp
        self.item = DTYPE_BYTES[plan.precision.param]
        self.batches = micro_batches(plan) or 1
        self.stages, self.world = plan.mesh.pp, plan.mesh.world_size
        self.machine = machine
        self.of_element = element_bytes(analysis) / shard_ranks(analysis) / self.stages
        self.shards = shard_ranks(analysis)
        self.master = DTYPE_BYTES[plan.precision.master]
        self.keeps_activations = plan.offload is None or plan.offload.activations == "none"
        rules = recomputed_modules(analysis) if plan.compile is None else {}
        self.recomputed = {path for path, rule in rules.items() if isinstance(rule.treatment, Full | Every)}
        self.kernels = LocalKernels(machine.profile, {plan.precision.param}, possible_kernels(analysis))

    @property
    def key(self) -> tuple[object, ...]:
        """Cache key: plans with equal keys have equal costs."""
        return (
            self.world, self.ranks, self.tokens, self.sequences, self.item, self.batches, self.stages, self.of_element,
            self.shards, self.master, self.keeps_activations, frozenset(self.recomputed),
            self.kernels.attention_kernels, id(self.machine),
        )  # fmt: skip

    def again(self, path: str) -> int:
        """Number of a module's forward computations: 2 where it is recomputed, otherwise 1."""
        return 2 if any(above in self.recomputed for above in (path, *holders(path))) else 1

    def layer(self, info: ModuleInfo, style: Any, got: Tensor) -> Cost:
        """Cost of a linear layer, an embedding or a norm, with the changes of layout by its style."""
        if isinstance(style, Colwise | Rowwise):
            return self._cut_layer(info, style, got) + self._parameters(info, self.ranks)
        whole = self._parameters(info, 1)
        if info.kind == "linear":
            for weight in info.parameters:
                if len(weight.shape) == 2:
                    return whole + self._linear(info.path, *weight.shape)
        if info.kind == "norm":
            width = int(info.attributes.get("dim") or got.width or 0)
            size = self.bytes_of(width, got) if got.width in (None, width) else self.bytes_of(got.width or 0, got)
            grads = self._seconds("all_reduce", width * self.master) / self.batches if got.state == "shard" else 0.0
            return whole + self._moved("normalisation", _NORM_PASSES, size, info.path) + Cost(grads)
        return whole

    def conversion(self, path: str, style: Any, features: int, *, entering: bool) -> Cost:
        """Cost of the change of layout by `inputs` or `outputs`, for a module's first input or its output."""
        if entering:
            if not isinstance(style, Inputs):
                return Cost()
            source, target = as_list(style.source)[0], as_list(style.target)[0]
        else:
            style = style.then if isinstance(style, Inputs) else style
            if not isinstance(style, Outputs):
                return Cost()
            source, target = as_list(style.source)[0], as_list(style.target)[0]
        if isinstance(source, str) or isinstance(target, str):
            return Cost()
        # The gradient of a DTensor that was replicated for sharded layers is a partial sum on each rank.
        summed = isinstance(style, Inputs) and not style.local and isinstance(target, Replicated)
        back = Partial() if summed else target
        if overlaps(style):
            return self._converted(path, features, (source, target), (source, source))  # hidden in backward
        return self._converted(path, features, (source, target), (back, source))

    def operation(self, path: str, op: str, features: int, got: list[Tensor], heads: AttentionShape | None) -> Cost:
        """Cost of an operation between modules."""
        if op == "attention" and heads is not None:
            parts = self.ranks if got and got[0].state == "shard" else 1
            found = self.kernels.attention(
                heads, self.sequences, [AttentionPiece(self.length, self.length, True)], parts
            )
            return Cost() if found is None else self._passes(found, path)
        if op in ("add", "mul", "activation", "normalize", "softmax"):
            size = self.bytes_of(features, next((item for item in got if item.state == "shard"), got[0]))
            return self._moved("elementwise", Pass(len(got) + 1, len(got) + 1), size, path)
        return Cost()

    def loss(self, vocabulary: int, got: Tensor) -> Cost:
        """Cost of the loss, by the layout of the logits."""
        return self._moved("loss", _LOSS_PASSES, self.bytes_of(vocabulary, got, item=4), "")

    def kept(self, features: int, got: Tensor) -> float:
        """Bytes of a block's input, which is kept for its backward."""
        return self.bytes_of(features, got) / self.stages if self.keeps_activations else 0.0

    def bytes_of(self, features: int, tensor: Tensor, *, item: int | None = None) -> float:
        """Bytes of a rank's local part of a tensor."""
        return self._whole(features, item) / (self.ranks if tensor.state == "shard" else 1)

    def _whole(self, features: int, item: int | None = None) -> float:
        return self.tokens * features * (item or self.item)

    def _parameters(self, info: ModuleInfo, parts: int) -> Cost:
        """Cost of holding and updating a module's parameters, split into parts; a bias counts as split too."""
        untrained = untrained_parameters(self.analysis)
        frozen = sum(item.numel for item in info.parameters if info.child_path(item.name) in untrained) / parts
        elements = sum(item.numel for item in info.parameters) / parts - frozen
        passed = Movement(kind="optimizer", bytes=int(_OPTIMIZER_PASSES * self.master * elements / self.shards))
        floor = Movement(kind="optimizer", bytes=0)  # one kernel updates all parameters
        seconds = seconds_of(passed, self.machine.profile)[0] - seconds_of(floor, self.machine.profile)[0]
        of_frozen = self.master / self.shards / self.stages if self.of_element else 0.0
        return Cost(max(0.0, seconds) / self.batches, elements * self.of_element + frozen * of_frozen)

    def _cut_layer(self, info: ModuleInfo, style: Colwise | Rowwise, got: Tensor) -> Cost:
        embeds, rowwise = info.kind == "embedding", isinstance(style, Rowwise)
        wanted = layout_wanted(info, style)
        made: Layout = Partial() if rowwise else Sharded(dim=-1)
        default: Layout = Replicated() if rowwise else made
        given = style.input if style.input is not None else wanted
        leaves = style.output if style.output is not None else default
        rows, columns = info.parameters[0].shape
        work = Cost()
        if not embeds:
            cut = (rows, -(-columns // self.ranks)) if rowwise else (-(-rows // self.ranks), columns)
            # The layer reduces the gradient of a plain tensor itself; that of a DTensor stays a partial sum.
            grads: Layout = wanted if rowwise else Partial()
            after = grads if overlaps(style) or (got.wrapped and given == wanted) else given
            work = self._linear(info.path, *cut) + self._converted(info.path, columns, (given, wanted), (grads, after))
        width = columns if embeds else rows
        returned = Replicated() if rowwise else made  # the gradient of a partial sum is replicated
        return work + self._converted(info.path, width, (made, leaves), (leaves, returned))

    def _linear(self, path: str, rows: int, columns: int) -> Cost:
        found = self.kernels.linear(LinearShape(rows, columns), self.tokens, 1)
        return Cost() if found is None else self._passes(found, path)

    def _passes(self, took: Pass, path: str) -> Cost:
        return Cost(took.forward * self.again(path) + took.backward)

    def _moved(self, kind: MovementKind, passes: Pass, size: float, path: str) -> Cost:
        """Cost of reading and writing a tensor `passes` times; forward and backward are one kernel each."""
        forms: tuple[tuple[float, MovementForm], ...] = ((passes.forward, ""), (passes.backward, "backward"))
        forward, backward = (
            seconds_of(Movement(kind=kind, bytes=int(count * size), form=form), self.machine.profile)[0]
            for count, form in forms
        )
        return self._passes(Pass(forward, backward), path)

    def _converted(
        self, path: str, features: int, forward: tuple[Layout, Layout], backward: tuple[Layout, Layout]
    ) -> Cost:
        size = self._whole(features)
        return Cost(self._resharded(*forward, size) * self.again(path) + self._resharded(*backward, size))

    def _resharded(self, source: Layout, target: Layout, size: float) -> float:
        """Seconds of the collective that changes a tensor's layout."""
        match source, target:
            case Partial(), Replicated():
                return self._seconds("all_reduce", size)
            case Partial(), Sharded():
                return self._seconds("reduce_scatter", size)
            case Sharded(), Replicated():
                return self._seconds("all_gather", size)
            case Sharded(dim=first), Sharded(dim=second) if first != second:
                return self._seconds("all_to_all", size / self.ranks)
        return 0.0

    def _seconds(self, kind: CollectiveKind, size: float) -> float:
        return seconds_on_tp(self.analysis, self.machine, kind, size)
