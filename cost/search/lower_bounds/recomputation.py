"""Lower bound of recomputation: of a plan's own treatments, and of any treatments within a memory limit.

What a block's backward reads of its forward is either kept or computed again, so that memory bounds what any choice of
treatments must recompute. The relaxation is a fractional knapsack, whose items are the outputs of a block's layers.

An output counts where backward reads it, or something of its size that cannot be computed without it: queries, keys and
values, the output of attention, the residual sum, norms, the factors of a feed-forward module, and its last layer's
input. The output of a block's last layer is the next block's input, and is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from legoai.cost.search.lower_bounds.activations import bytes_of_feature, freed_with_blocks, fuses_attention
from legoai.cost.search.lower_bounds.local_kernels import Pass
from legoai.cost.search.lower_bounds.products import recomputed_products
from legoai.cost.search.lower_bounds.sharded_layers import children
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.computation.checkpoint import recomputed_modules
from legoai.dsl.analysis.facts import holders, modules_inside
from legoai.dsl.analysis.magnitudes.flops import FEATURES_KNOWN
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.specs.directives.checkpoint import Every, Full, KeepAll, Selective
from legoai.specs.directives.hole import Undecided
from legoai.specs.directives.model import FOREIGN
from legoai.specs.directives.precision import Float8, MxFp8
from legoai.specs.models.manifests.manifest import Manifest

_LAYERS: Final = frozenset({"linear", "attention"})
"""Kinds of the modules whose forward is bounded."""


class Output(NamedTuple):
    """Output of a layer: least seconds to compute it again, and its bytes on a rank, both for one micro batch."""

    seconds: float
    bytes: float


def by_treatments(analysis: Analysis, least: Mapping[str, Pass]) -> dict[str, float]:
    """Least seconds that a plan's treatments recompute, by the recomputing module.

    torch stops to recompute when all that was saved is there again, so that the last product of a module may be left
    out: the largest counts as that one, where it is not known which ones come before it. Of compiled modules torch's
    partitioner leaves out every product that no backward reads, of which a block has one, where it is known.

    Args:
        analysis: of a plan, whose treatments may be open: then nothing is known of them.
        least: seconds of layers for one micro batch.
    """
    if not _as_treated(analysis):
        return {}
    try:
        known = _recomputing(analysis)
    except Undecided:
        return {}
    inside: dict[str, list[float]] = {}
    for path, took in least.items() if known.of_layers else ():
        if path in known.of_layers:
            inside.setdefault(known.of_layers[path], []).append(took.forward)
    return {path: sum(parts) if path in known.halved else _up_to_last(parts) for path, parts in inside.items()}


def _as_treated(analysis: Analysis) -> bool:
    """Whether what is kept by no treatment is recomputed, but for the last product of a module.

    Modules of other authors may end in several products that read what is kept. Of a compiled module the partitioner
    recomputes what a treatment marks, so far as a backward reads it. In the families whose features are known that is
    the output of every layer of a block but the last: attention and feed-forward follow one another.
    """
    plan = analysis.plan
    if plan.model.family in FOREIGN:
        return False
    return plan.compile is None or (plan.model.family in FEATURES_KNOWN and not is_traced(analysis))


@fact
def blocks_moved_again(analysis: Analysis) -> tuple[str, ...]:
    """The blocks that are recomputed as a whole but for products, attention and collectives, which may be kept.

    Raises:
        Undecided: a treatment is a hole.
    """
    if analysis.plan.compile is not None or analysis.manifest is None:
        return ()
    blocks = {path for item in analysis.manifest.block_lists for path in item.paths}
    return tuple(
        path
        for path, rule in recomputed_modules(analysis).items()
        if path in blocks and (isinstance(rule.treatment, Full | Every) or _keeps_layers(rule.treatment))
    )


def _keeps_layers(treatment: object) -> bool:
    """Whether selective checkpointing keeps nothing but outputs of layers, and what these communicate."""
    return isinstance(treatment, Selective) and {"attention", "matmul", "alternate_matmul", "collective"}.issuperset(
        treatment.keep
    )


def recomputed_under(
    analysis: Analysis, block: str, treatment: object, least: Mapping[str, Pass], moved_again: float
) -> float | None:
    """Least seconds that a block recomputes for one micro batch under a treatment; None where it is not known.

    Args:
        analysis: of the plan.
        block: its path.
        treatment: of the block as a whole.
        least: seconds of layers for one micro batch.
        moved_again: seconds of what else it computes again.
    """
    manifest = analysis.manifest
    assert manifest is not None
    if analysis.plan.compile is not None:
        return None
    if isinstance(treatment, KeepAll):
        return 0.0
    layers = [path for path, module in modules_inside(analysis, block).items() if module.kind in _LAYERS]
    if isinstance(treatment, Full):
        return _up_to_last([least[path].forward for path in layers if path in least]) + moved_again
    if not _keeps_layers(treatment):
        return None
    assert isinstance(treatment, Selective)
    if fuses_attention(analysis) and _keeps_every_second(treatment):
        again = recomputed_products(manifest, block)
        if again:
            return sum(least[path].forward for path in again if path in least) + moved_again
    kept = _kinds_kept(treatment)
    parts = [least[path].forward for path in layers if path in least and manifest.modules[path].kind not in kept]
    return _up_to_last(parts) + moved_again


class _Recomputing(NamedTuple):
    """The module that recomputes each layer, and those of these that keep every second product."""

    of_layers: Mapping[str, str]
    halved: Collection[str]


@fact
def _recomputing(analysis: Analysis) -> _Recomputing:
    """Which layers are computed again.

    Raises:
        Undecided: a treatment is a hole.
    """
    rules, manifest = recomputed_modules(analysis), analysis.manifest
    if manifest is None or not rules:
        return _Recomputing({}, ())
    fused, of_layers = fuses_attention(analysis), dict[str, str]()
    halved = {
        path: recomputed_products(manifest, path)
        for path, rule in rules.items()
        if fused and _keeps_every_second(rule.treatment)
    }
    for path, module in manifest.modules.items():
        recomputing = [holder for holder in holders(path) if holder in rules]
        if not recomputing:
            continue
        first, outermost = rules[recomputing[0]].treatment, rules[recomputing[-1]].treatment
        if isinstance(outermost, Full | Every):
            of_layers[path] = recomputing[-1]
        elif len(recomputing) == 1 and halved.get(recomputing[0]):
            if path in halved[recomputing[0]]:
                of_layers[path] = recomputing[0]
        elif len(recomputing) == 1 and isinstance(first, Selective) and module.kind in _LAYERS - _kinds_kept(first):
            of_layers[path] = recomputing[0]
    return _Recomputing(of_layers, [path for path, layers in halved.items() if layers])


def _keeps_every_second(treatment: object) -> bool:
    """Whether a treatment keeps every second product, and nothing else but attention."""
    return isinstance(treatment, Selective) and {"alternate_matmul"} <= {*treatment.keep} <= {
        "alternate_matmul", "attention",
    }  # fmt: skip


class WholeBlock(NamedTuple):
    """A block that is recomputed as a whole: in the first stage of a pipeline whose backward is in halves, or another.

    Both have the bytes that the block keeps otherwise, beside its input.
    """

    in_first: Output
    in_others: Output


def whole_block(analysis: Analysis, block: str, least: Mapping[str, Pass]) -> WholeBlock | None:
    """What it takes to recompute a block as a whole where backward is in halves; None if it is not known.

    torch computes the gradients of inputs and of weights apart only of blocks that are kept or recomputed as a whole.

    Args:
        analysis: of a plan whose mesh and micro batch are decided.
        block: its path.
        least: seconds of layers for one micro batch.

    Raises:
        Undecided: it depends on a hole.
    """
    size = freed_with_blocks(analysis).get(block)
    if size is None:
        return None
    once = _up_to_last([least[path].forward for path in modules_inside(analysis, block) if path in least])
    more = by_second_half(analysis, {block: once})
    return WholeBlock(Output(once, size), Output(once + more[block], size))


def by_second_half(analysis: Analysis, recomputed: Mapping[str, float]) -> dict[str, float]:
    """Seconds that the second half of a backward recomputes beside the first, by the recomputing module.

    It reads what layers were given, for which the modules that hold them are recomputed once more.

    Args:
        analysis: of the plan.
        recomputed: seconds to recompute each module once.
    """
    hold = _holders_of_linear(analysis) if recomputed else frozenset()
    return {path: seconds if path in hold else 0.0 for path, seconds in recomputed.items()}


@fact
def _holders_of_linear(analysis: Analysis) -> frozenset[str]:
    """The modules that hold linear layers."""
    assert analysis.manifest is not None
    linear = [path for path, module in analysis.manifest.modules.items() if module.kind == "linear"]
    return frozenset(holder for path in linear for holder in holders(path))


def _up_to_last(parts: Sequence[float]) -> float:
    """Least seconds of a recomputation that may stop before the last of its products."""
    return max(0.0, sum(parts) - max(parts, default=0.0))


def _kinds_kept(treatment: Selective) -> frozenset[str]:
    """Kinds of layers of which some output may be kept: what is named by an operator may be any."""
    named = {"attention": ("attention",), "matmul": ("linear",), "alternate_matmul": ("linear",), "collective": ()}
    return frozenset(kind for item in treatment.keep for kind in named.get(item, ("linear", "attention")))


class _Read(NamedTuple):
    """What backward reads of a token: its features, and what computes them.

    Attributes:
        features: of a token.
        layer: whose output it is; None of a norm, an activation function or a gate.
        waits: whether the layer waits for its input.
        moved: features that a kernel reads and writes of which it is the output.
    """

    features: int
    layer: str | None = None
    waits: bool = False
    moved: int = 0


def outputs_of_blocks(
    analysis: Analysis,
    blocks: Sequence[str],
    least: Mapping[str, Pass],
    waits: Mapping[str, Pass],
    moves: Callable[[float], float],
) -> list[list[Output]]:
    """The outputs inside of some blocks that backward reads; none where it is not known what blocks keep.

    Args:
        analysis: of a plan whose mesh and micro batch are decided.
        blocks: their paths.
        least: seconds of layers for one micro batch.
        waits: of these, seconds in which a layer waits for its input.
        moves: seconds of a kernel that reads and writes some bytes.

    Raises:
        Undecided: it depends on a hole.
    """
    plan, manifest = analysis.plan, analysis.manifest
    offloaded = plan.offload is not None and plan.offload.activations != "none"
    if manifest is None or plan.model.family not in FEATURES_KNOWN or plan.compile is not None or offloaded:
        return []
    if any(isinstance(rule.treatment, Float8 | MxFp8) for rule in plan.precision.rules):
        return []
    of_feature = bytes_of_feature(analysis) / plan.mesh.tp

    def output(one: _Read) -> Output:
        size = one.features * of_feature
        if one.layer is None:
            return Output(moves(one.moved * of_feature), size)
        waited = waits[one.layer].forward if one.waits and one.layer in waits else 0.0
        return Output(least[one.layer].forward - waited, size)

    read = _outputs_read(analysis)
    return [[output(one) for one in read[block] if one.layer is None or one.layer in least] for block in blocks]


@fact
def _outputs_read(analysis: Analysis) -> dict[str, tuple[_Read, ...]]:
    """What backward reads of each block, as :func:`_read_by_backward` says."""
    manifest, fused = analysis.manifest, fuses_attention(analysis)
    assert manifest is not None
    return {
        block: tuple(_read_by_backward(manifest, block, fused=fused))
        for blocks in manifest.block_lists
        for block in blocks.paths
    }


def _read_by_backward(manifest: Manifest, block: str, *, fused: bool) -> Iterator[_Read]:
    """The outputs inside of a block that are read."""
    if manifest.modules[block].kind != "block":
        return
    yield from _norms_read(manifest, block)
    for part in children(manifest, block):
        linear = [item for item in children(manifest, part.path) if item.kind == "linear"]
        if part.kind == "attention" and linear:
            *inputs, output = linear
            for item in inputs:
                yield _Read(int(item.attributes["out_features"]), item.path, waits=True)
            if fused and {"n_heads", "head_dim"} <= part.attributes.keys():
                heads, width = int(part.attributes["n_heads"]), int(part.attributes["head_dim"])
                yield _Read(heads * width, part.path)
            yield _Read(int(output.attributes["out_features"]), output.path)
        elif part.kind == "feed_forward" and linear:
            shape = linear[0].attributes
            hidden = int(shape["out_features"])
            for item in linear if shape["in_features"] != shape["out_features"] else linear[:1]:
                if item.attributes["out_features"] == shape["out_features"]:
                    yield _Read(hidden, item.path, waits=True)
            # The gate's other factor is the output of an activation function, and the last layer's input the product.
            operations = [step.op for step in part.flow]
            if operations.count("activation") == 1:
                yield _Read(hidden, moved=2 * hidden)
                if operations.count("mul") == 1 and operations.index("mul") > operations.index("activation"):
                    yield _Read(hidden, moved=3 * hidden)


def _norms_read(manifest: Manifest, block: str) -> Iterator[_Read]:
    """The norms of a block whose outputs its attention or its feed-forward module is given, and reads in backward."""
    module = manifest.modules[block]
    called = [manifest.modules.get(module.child_path(step.name)) if step.op == "call" else None for step in module.flow]
    for place, norm in enumerate(called):
        given = (one for one, step in zip(called, module.flow, strict=True) if place in step.inputs and one is not None)
        if norm is not None and norm.kind == "norm" and any(one.kind in ("attention", "feed_forward") for one in given):
            width = int(norm.attributes["dim"])
            yield _Read(width, moved=2 * width)


def least_recomputed(outputs: Sequence[Output], room: float) -> float:
    """Least seconds to compute again what cannot be kept, where fractions of outputs can.

    Args:
        outputs: that backward reads.
        room: bytes for those that are kept.
    """
    recomputed = sum(item.seconds for item in outputs)
    for item in by_worth(outputs):
        share = min(1.0, max(0.0, room) / item.bytes) if item.bytes > 0.0 else 1.0
        recomputed -= share * item.seconds
        room -= share * item.bytes
    return max(0.0, recomputed)


def least_kept(outputs: Sequence[Output], seconds: float) -> float:
    """Least bytes that are kept where no more than so many seconds are recomputed; the inverse of the above."""
    recomputed, kept = sum(item.seconds for item in outputs), 0.0
    for item in by_worth(outputs):
        if recomputed <= seconds:
            break
        share = min(1.0, (recomputed - seconds) / item.seconds) if item.seconds > 0.0 else 1.0
        recomputed -= share * item.seconds
        kept += share * item.bytes
    return kept


def by_worth(outputs: Sequence[Output]) -> list[Output]:
    """Outputs, those first whose bytes save the most seconds."""
    return sorted(outputs, key=lambda item: item.bytes / item.seconds if item.seconds > 0.0 else float("inf"))
