"""Least activations that a decoder's blocks keep for their backward, without a simulation.

What a block keeps of a token, in features, follows from the formulas of the gradients: a linear layer's input, for the
gradient of its weight; the queries, keys, values and output of fused attention; the input of a norm; the input of an
activation function, and both factors of a gate. Under selective checkpointing it is the input of the recomputed module
and the outputs that are listed. What else may be kept counts as nothing.

Tensor-parallel ranks share these features, but for those that are whole on each of them
(:mod:`legoai.cost.search.least_costs.cut_layers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from legoai.cost.kernels.model_flops import DECODERS
from legoai.cost.search.least_costs.cut_layers import CutLayers, children, cut_layers
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import local_tokens
from legoai.dsl.analysis.checkpoint import recomputed_modules
from legoai.dsl.analysis.facts import below, holders
from legoai.dsl.analysis.precision import output_bytes
from legoai.specs.directives.checkpoint import Selective
from legoai.specs.directives.precision import Float8, MxFp8
from legoai.specs.models.manifest import Manifest, ModuleInfo

_FUSED = frozenset({"default", "flash", "efficient", "cudnn"})
"""Kernels of attention that keep queries, keys, values and output; what others keep is not less, and not bounded."""
_GATED = 3
"""Linear layers of a feed-forward module with a gate."""


def kept_by_blocks(analysis: Analysis) -> int:
    """Bytes that one micro batch leaves in the blocks of a rank for its backward, at least; 0 where it is not known.

    Raises:
        Undecided: it depends on a hole.
    """
    widths, mesh = _widths(analysis), analysis.plan.mesh
    return sum(widths.values()) * _bytes_of_feature(analysis) // (mesh.pp * mesh.tp) if widths else 0


def kept_of_blocks(analysis: Analysis) -> dict[str, int]:
    """Bytes that one micro batch leaves in each block on the ranks of its stage, as :func:`kept_by_blocks`.

    Raises:
        Undecided: it depends on a hole.
    """
    tp = analysis.plan.mesh.tp
    return {block: width * _bytes_of_feature(analysis) // tp for block, width in _widths(analysis).items()}


def handed_on(analysis: Analysis) -> int:
    """Bytes that a block hands to the next one for one micro batch, on each rank, at least; 0 where it is not known.

    Raises:
        Undecided: it depends on a hole.
    """
    plan = analysis.plan
    if plan.model.family not in DECODERS:
        return 0
    return int(plan.model.source().config().dim) * _bytes_of_feature(analysis) // plan.mesh.tp


def _bytes_of_feature(analysis: Analysis) -> int:
    """Bytes of a feature of all tokens of a micro batch on a rank."""
    return local_tokens(analysis.plan) * output_bytes(analysis.plan.precision)


def _widths(analysis: Analysis) -> dict[str, int]:
    """Features of a token that each block keeps on all tensor-parallel ranks together; none where it is not known."""
    plan, manifest = analysis.plan, analysis.manifest
    assert manifest is not None
    offloaded = plan.offload is not None and plan.offload.activations != "none"
    if plan.model.family not in DECODERS or plan.compile is not None or offloaded:
        return {}
    blocks = [f"{item.path}.{name}" if item.path else name for item in manifest.block_lists for name in item.names]
    recomputed = recomputed_modules(analysis)
    if any(below(blocks[0], path) for path in recomputed):
        return {}
    widths = dict.fromkeys(blocks, int(plan.model.source().config().dim))
    if not any(isinstance(rule.treatment, Float8 | MxFp8) for rule in plan.precision.rules):
        features = _Features(manifest, plan.attention.kernel in _FUSED, plan.mesh.tp, cut_layers(analysis))
        for path, module in manifest.modules.items():
            above = [path, *holders(path)]
            block = next((one for one in above[1:] if one in widths), None)
            if block is not None:
                treatments = [recomputed[holder].treatment for holder in above if holder in recomputed]
                widths[block] += sum(features.kept(path, module, treatments))
    return widths


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
    cut: CutLayers

    def kept(self, path: str, module: ModuleInfo, treatments: Sequence[Any]) -> Iterator[int]:
        """Those of a module, its children's not counted.

        Args:
            path: of the module.
            module: the module.
            treatments: of those that hold it, where these are recomputed.
        """
        if treatments:
            if len(treatments) == 1 and isinstance(treatments[0], Selective):
                yield from self._listed(path, module, treatments[0].keep)
            return
        layers = [child for child in children(self.manifest, path) if child.kind == "linear"]
        # Layers may share an input, which has one width.
        inputs: dict[int, int] = {}
        for layer in layers:
            width = int(layer.attributes["in_features"])
            inputs[width] = max(inputs.get(width, 0), width * (self.tp if layer.path in self.cut.take_whole else 1))
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

    def _listed(self, path: str, module: ModuleInfo, keep: tuple[str, ...]) -> Iterator[int]:
        """Outputs that selective checkpointing keeps of a module."""
        if module.kind == "linear" and "matmul" in keep:
            yield int(module.attributes["out_features"]) * (self.tp if path in self.cut.sum_up else 1)
        elif module.kind == "attention" and "attention" in keep and self.fused:
            heads, _, width = _heads(module)
            yield heads * width


def _heads(module: ModuleInfo) -> tuple[int, int, int]:
    heads = int(module.attributes["n_heads"])
    return heads, int(module.attributes.get("n_kv_heads", heads)), int(module.attributes["head_dim"])


def _is_second(manifest: Manifest, path: str) -> bool:
    """Whether a norm is in a block and not its first: the first one's input is the block's."""
    parent = path.rpartition(".")[0]
    above = manifest.modules[parent]
    norms = [child.path for child in children(manifest, parent) if child.kind == "norm"]
    return above.kind == "block" and path in norms[1:]
