"""Lower bound of the activations that a decoder's blocks keep for their backward.

What a block keeps of a token, in features, follows from the formulas of the gradients: a linear layer's input, for the
gradient of its weight; the queries, keys, values and output of fused attention; the input of a norm; the input of an
activation function, and both factors of a gate. Under selective checkpointing it is the input of the recomputed module
and the outputs that are listed. What else may be kept counts as nothing. A compiled block keeps at least the outputs of
its products and of its attention, of which torch's partitioner computes none again that no treatment marks.

Tensor-parallel ranks share these features, but for those that are whole on each of them
(:mod:`legoai.cost.search.lower_bounds.sharded_layers`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from legoai.cost.search.lower_bounds.products import kept_products
from legoai.cost.search.lower_bounds.sharded_layers import NONE_CUT, ShardedLayers, children, cut_layers
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import local_tokens
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.computation.attention import possible_kernels
from legoai.dsl.analysis.computation.checkpoint import recomputed_modules
from legoai.dsl.analysis.computation.precision import computes_in_float8, output_bytes
from legoai.dsl.analysis.facts import below, holders, modules_inside
from legoai.dsl.analysis.magnitudes.flops import DECODERS, FEATURES_KNOWN
from legoai.dsl.frontend.paths import pattern
from legoai.specs.directives.checkpoint import Budget, KeepAll, Selective
from legoai.specs.directives.hole import Undecided
from legoai.specs.models.manifests.manifest import Manifest, ModuleInfo

FUSED = frozenset({"default", "flash", "efficient", "cudnn"})
"""Kernels of attention that keep queries, keys, values and output; what others keep is not less, and not bounded."""
_GATED = 3
"""Linear layers of a feed-forward module with a gate."""


def kept_by_blocks(analysis: Analysis) -> int:
    """Bytes that one micro batch leaves in the blocks of a rank for its backward, at least; 0 where it is not known.

    Raises:
        Undecided: it depends on a hole.
    """
    mesh = analysis.plan.mesh
    width = _whole_width(analysis) if analysis.plan.compile is None else _width_of_products(analysis)
    return width * bytes_of_feature(analysis) // (mesh.pp * mesh.tp) if width else 0


def held_in_backward(analysis: Analysis) -> int:
    """Bytes that a rank holds when the backward of a block's feed-forward module begins, at least; 0 if not known.

    All that its backward works on is there then, whether it was kept or computed again, beside what other blocks keep.

    Raises:
        Undecided: it depends on a hole.
    """
    width, mesh = _whole_width(analysis), analysis.plan.mesh
    if not width:
        return 0
    return (width // mesh.pp + _added_in_backward(analysis)) * bytes_of_feature(analysis) // mesh.tp


def freed_with_last(analysis: Analysis) -> int:
    """Bytes of these that are freed with the last block, at most: of what is not counted, none is freed.

    Raises:
        Undecided: it depends on a hole.
    """
    widths = list(_widths(analysis).values())
    return widths[-1] * bytes_of_feature(analysis) // analysis.plan.mesh.tp if widths else 0


@fact
def _whole_width(analysis: Analysis) -> int:
    """Features of a token that all blocks keep."""
    return sum(_widths(analysis).values())


@fact
def _width_of_products(analysis: Analysis) -> int:
    """Features of a token that all blocks keep, some of them compiled: their inputs, and outputs that backward reads.

    What follows a product and is recomputed from its output, as an activation function, is no narrower than that, so
    that a partitioner may keep one for the other. Nothing reads the output of a feed-forward module's last layer.
    """
    manifest, blocks, compiled = analysis.manifest, _known_blocks(analysis), analysis.plan.compile
    assert manifest is not None
    paths = [rule.path for rule in compiled.rules] if compiled is not None else []
    if computes_in_float8(analysis.plan.precision) or _are_inside(analysis, blocks, paths):
        return 0
    width = len(blocks) * _dim(analysis)
    recomputed = recomputed_modules(analysis)
    for block in blocks:
        for path, module in modules_inside(analysis, block).items():
            treatments = [recomputed[holder].treatment for holder in (path, *holders(path)) if holder in recomputed]
            if any(not isinstance(one, Selective) for one in treatments):
                continue
            if module.kind == "attention" and all("attention" in one.keep for one in treatments):
                heads, _, size = _heads(module)
                width += heads * size
            elif module.kind == "linear" and all("matmul" in one.keep for one in treatments):
                above = manifest.modules[path.rpartition(".")[0]]
                last = above.kind == "feed_forward" and int(module.attributes["out_features"]) == _dim(analysis)
                width += 0 if last else int(module.attributes["out_features"])
    return width


@fact
def _added_in_backward(analysis: Analysis) -> int:
    """Features of a token that a block has in its feed-forward module's backward beyond what it keeps, at least."""
    inside, given = _in_feed_forward(analysis), _dim(analysis)
    return min(max(0, inside.get(block, 0) + given - width) for block, width in _widths(analysis).items())


def kept_of_blocks(analysis: Analysis) -> dict[str, int]:
    """Bytes that one micro batch leaves in each block on the ranks of its stage, as :func:`kept_by_blocks`.

    Raises:
        Undecided: it depends on a hole.
    """
    tp, of_feature = analysis.plan.mesh.tp, bytes_of_feature(analysis)
    return {block: width * of_feature // tp for block, width in _widths(analysis).items()}


def freed_with_blocks(analysis: Analysis) -> dict[str, float]:
    """Bytes beyond its input that each block keeps for one micro batch, if nothing of it is recomputed, at least.

    Raises:
        Undecided: it depends on a hole.
    """
    of_feature, given = bytes_of_feature(analysis) / analysis.plan.mesh.tp, _dim(analysis)
    return {block: (width - given) * of_feature for block, width in _untreated(analysis).items()}


def between_halves(analysis: Analysis) -> dict[str, int]:
    """Bytes that each block has of one micro batch between the halves of its backward beside what it keeps, at least.

    The second half computes the gradients of weights, from those of the outputs of linear layers.

    Raises:
        Undecided: it depends on a hole.
    """
    if computes_in_float8(analysis.plan.precision):
        return {}
    tp, of_feature = analysis.plan.mesh.tp, bytes_of_feature(analysis)
    return {block: features * of_feature // tp for block, features in _given_by_linear(analysis).items()}


def inputs_of_blocks(analysis: Analysis) -> int:
    """Bytes of the inputs of all blocks for one micro batch, over all stages, whatever is recomputed; 0 if not known.

    Raises:
        Undecided: it depends on a hole.
    """
    blocks = _blocks(analysis)
    return len(blocks) * _dim(analysis) * bytes_of_feature(analysis) // analysis.plan.mesh.tp if blocks else 0


def worked_on(analysis: Analysis) -> int:
    """Bytes that the backward of some block's feed-forward module works on, at least, for one micro batch.

    Raises:
        Undecided: it depends on a hole.
    """
    blocks, inside = _blocks(analysis), _in_feed_forward(analysis)
    least = min((inside.get(block, 0) for block in blocks), default=0)
    return least * bytes_of_feature(analysis) // analysis.plan.mesh.tp


@fact
def handed_on(analysis: Analysis) -> int:
    """Bytes that a block hands to the next one for one micro batch, on each rank, at least; 0 where it is not known.

    Raises:
        Undecided: it depends on a hole.
    """
    plan = analysis.plan
    if plan.model.family not in DECODERS:
        return 0
    return int(plan.model.source().config().dim) * bytes_of_feature(analysis) // plan.mesh.tp


def bytes_of_feature(analysis: Analysis) -> int:
    """Bytes of a feature of all tokens of a micro batch on a rank."""
    return local_tokens(analysis.plan) * output_bytes(analysis.plan.precision)


def fuses_attention(analysis: Analysis) -> bool:
    """Whether attention is one kernel, of which it is known what it keeps, whatever hole of it is open."""
    return possible_kernels(analysis) <= FUSED


@fact
def _widths(analysis: Analysis) -> dict[str, int]:
    """Features of a token that each block keeps on all tensor-parallel ranks together; none where it is not known."""
    manifest, blocks = analysis.manifest, _blocks(analysis)
    assert manifest is not None
    widths = dict.fromkeys(blocks, _dim(analysis)) if blocks else {}
    try:
        recomputed = recomputed_modules(analysis)
    except Undecided:
        return widths  # any treatment keeps the inputs
    if not computes_in_float8(analysis.plan.precision):
        features = _features(analysis)
        for path, module in manifest.modules.items():
            above = [path, *holders(path)]
            block = next((one for one in above[1:] if one in widths), None)
            if block is not None:
                recomputing = {holder: recomputed[holder].treatment for holder in above if holder in recomputed}
                # Of a budget that is filled all counts here, and its share below.
                shared = all(holder == block and _fills(one) for holder, one in recomputing.items())
                widths[block] += sum(features.kept(path, module, {} if shared else recomputing))
        for block in blocks:
            rule = recomputed.get(block)
            if rule is not None and _fills(rule.treatment):
                # What is left of the budget has no room for one more output.
                more = rule.treatment.amount * (widths[block] - _dim(analysis)) - _widest(analysis)[block]
                widths[block] = _dim(analysis) + max(0, int(more))
    return widths


@fact
def _untreated(analysis: Analysis) -> dict[str, int]:
    """The same where nothing is recomputed, whatever the plan says."""
    manifest, blocks = analysis.manifest, _blocks(analysis)
    assert manifest is not None
    widths = dict.fromkeys(blocks, _dim(analysis)) if blocks else {}
    features = _features(analysis)
    for path, module in manifest.modules.items() if widths and not computes_in_float8(analysis.plan.precision) else ():
        block = next((one for one in holders(path) if one in widths), None)
        if block is not None:
            widths[block] += sum(features.kept(path, module, {}))
    return widths


def kept_under(analysis: Analysis, block: str, treatment: Any) -> float | None:
    """Bytes beyond its input that a block keeps for one micro batch under a treatment; None where it is not known.

    Raises:
        Undecided: it depends on another hole.
    """
    if block not in _blocks(analysis) or computes_in_float8(analysis.plan.precision):
        return None
    features, of_feature = _features(analysis), bytes_of_feature(analysis) / analysis.plan.mesh.tp
    if isinstance(treatment, Budget):
        whole = _untreated(analysis)[block] - _dim(analysis)
        return max(0.0, treatment.amount * whole - _widest(analysis)[block]) * of_feature if _fills(treatment) else 0.0
    recomputing = {} if isinstance(treatment, KeepAll) else {block: treatment}
    width = 0
    for path, module in modules_inside(analysis, block).items():
        width += sum(features.kept(path, module, recomputing))
    return width * of_feature


def _features(analysis: Analysis) -> _Features:
    assert analysis.manifest is not None
    tp = analysis.plan.mesh.tp
    try:
        cut = cut_layers(analysis)
    except Undecided:
        cut = NONE_CUT  # of open styles each may leave everything in parts
    return _Features(analysis.manifest, fuses_attention(analysis), tp, cut)


def _fills(treatment: Any) -> bool:
    """Whether a treatment keeps the best outputs that find room in a share of all, so that none that would is left."""
    return isinstance(treatment, Budget) and isinstance(treatment.amount, float) and treatment.by != "greedy"


@fact
def _widest(analysis: Analysis) -> dict[str, int]:
    """The widest output of each block's layers, in features, and of its norms, which compute in 4 bytes."""
    manifest, widest = analysis.manifest, dict.fromkeys(_blocks(analysis), 0)
    assert manifest is not None
    for path, module in manifest.modules.items():
        block = next((one for one in (path, *holders(path)) if one in widest), None)
        if block is not None and module.kind == "linear":
            widest[block] = max(widest[block], int(module.attributes["out_features"]))
        elif block is not None and module.kind == "norm":
            widest[block] = max(widest[block], 2 * int(module.attributes["dim"]))
    return widest


@fact
def _blocks(analysis: Analysis) -> tuple[str, ...]:
    """The blocks of a decoder; none where it is not known that each keeps its input."""
    return () if analysis.plan.compile is not None else _known_blocks(analysis)


def _known_blocks(analysis: Analysis) -> tuple[str, ...]:
    """The same, where some of them may be compiled."""
    plan, manifest = analysis.plan, analysis.manifest
    assert manifest is not None
    offloaded = plan.offload is not None and plan.offload.activations != "none"
    if plan.model.family not in FEATURES_KNOWN or offloaded:
        return ()
    blocks = tuple(path for item in manifest.block_lists for path in item.paths)
    treated = [rule.path for rule in plan.checkpoint.rules] if plan.checkpoint is not None else []
    return () if _are_inside(analysis, blocks, treated) else blocks


def _are_inside(analysis: Analysis, blocks: Sequence[str], patterns: Iterable[str]) -> bool:
    """Whether blocks are in a module that matches one of these, which is none of them."""
    paths = (path for one in patterns for path in analysis.module_paths.matching(pattern(one)))
    return any(below(blocks[0], path) for path in paths) if blocks else False


@fact
def _dim(analysis: Analysis) -> int:
    """Features of a token between blocks; 0 where it is not known what these keep."""
    model = analysis.plan.model
    return int(model.source().config().dim) if model.family in FEATURES_KNOWN else 0


@fact
def _given_by_linear(analysis: Analysis) -> dict[str, int]:
    """Features of a token that the linear layers of each block give, on all `tp` ranks together."""
    manifest, found = analysis.manifest, dict.fromkeys(_blocks(analysis), 0)
    assert manifest is not None
    for path, module in manifest.modules.items() if found else ():
        block = next((one for one in holders(path) if one in found), None)
        if block is not None and module.kind == "linear":
            found[block] += int(module.attributes["out_features"])
    return found


@fact
def _in_feed_forward(analysis: Analysis) -> dict[str, int]:
    """Features of a token that the backward of a block's feed-forward module works on, on all `tp` ranks together.

    When its last layer's gradients are computed, there is all that the module's backward reads: its input, the inputs
    of its activation function and of its last layer, and both factors of a gate; and the gradients of the last layer's
    output and input.
    """
    manifest = analysis.manifest
    assert manifest is not None
    if computes_in_float8(analysis.plan.precision):
        return {}
    found = {}
    for block in _blocks(analysis):
        for part in children(manifest, block):
            layers = [item for item in children(manifest, part.path) if item.kind == "linear"]
            if part.kind == "feed_forward" and layers:
                hidden = int(layers[0].attributes["out_features"])
                given = int(layers[0].attributes["in_features"])
                found[block] = 2 * given + hidden * (2 + len(layers) if len(layers) == _GATED else 3)
    return found


@dataclass(frozen=True, slots=True)
class _Features:
    """Features of a token that modules inside of a block keep on all tensor-parallel ranks together.

    Attributes:
        manifest: of the model.
        fused: whether attention is one kernel.
        tp: tensor-parallel ranks.
        cut: layers that are cut over them.
    """

    manifest: Manifest
    fused: bool
    tp: int
    cut: ShardedLayers

    def kept(self, path: str, module: ModuleInfo, treatments: Mapping[str, Any]) -> Iterator[int]:
        """Those of a module, its children's not counted.

        Args:
            path: of the module.
            module: the module.
            treatments: of those that hold it, by their paths, where these are recomputed.
        """
        if treatments:
            [(holder, treatment), *more] = treatments.items()
            if not more and isinstance(treatment, Selective):
                yield from self._listed(path, module, treatment.keep, holder)
            return
        layers = [child for child in children(self.manifest, path) if child.kind == "linear"]
        # Layers may share an input, which has one width.
        inputs: dict[int, int] = {}
        for layer in layers:
            width = int(layer.attributes["in_features"])
            whole = layer.path in self.cut.take_whole and layer.path not in self.cut.gather_again
            inputs[width] = max(inputs.get(width, 0), width * (self.tp if whole else 1))
        yield sum(inputs.values())
        if module.kind == "attention" and self.fused:
            heads, key_heads, width = _heads(module)
            yield (heads + 2 * key_heads) * width
            if len(inputs) == 1:
                yield heads * width  # the output, which is the last layer's input, and as wide as that of the others
        elif module.kind == "feed_forward" and layers:
            hidden = int(layers[0].attributes["out_features"])
            yield hidden * (3 if len(layers) == _GATED else 1)
        elif module.kind == "norm" and _is_second(self.manifest, path):
            yield int(module.attributes["dim"])

    def _listed(self, path: str, module: ModuleInfo, keep: tuple[str, ...], holder: str) -> Iterator[int]:
        """Outputs that selective checkpointing of a holder keeps of a module."""
        if module.kind == "linear" and ("matmul" in keep or self._is_kept(path, keep, holder)):
            yield int(module.attributes["out_features"]) * (self.tp if path in self.cut.sum_up else 1)
        elif module.kind == "attention" and "attention" in keep and self.fused:
            heads, _, width = _heads(module)
            yield heads * width

    def _is_kept(self, path: str, keep: tuple[str, ...], holder: str) -> bool:
        """Whether a linear layer is one of every second that a holder keeps."""
        return self.fused and "alternate_matmul" in keep and path in kept_products(self.manifest, holder)


def _heads(module: ModuleInfo) -> tuple[int, int, int]:
    heads = int(module.attributes["n_heads"])
    return heads, int(module.attributes.get("n_kv_heads", heads)), int(module.attributes["head_dim"])


def _is_second(manifest: Manifest, path: str) -> bool:
    """Whether a norm is in a block and not its first: the first one's input is the block's."""
    parent = path.rpartition(".")[0]
    above = manifest.modules[parent]
    norms = [child.path for child in children(manifest, parent) if child.kind == "norm"]
    return above.kind == "block" and path in norms[1:]
