"""Linear layers that are sharded over `tp`, and which of their tensors are nevertheless whole on every rank.

A layer that is sharded by output features takes its input whole; one that is sharded by input features gives a partial
sum of its whole output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.layouts.tensors import as_list
from legoai.dsl.analysis.parallelism.overlap import possibly_overlapped
from legoai.dsl.analysis.parallelism.shard import tensor_parallel
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.layouts import Layout, Replicated, Sharded
from legoai.specs.directives.shard import Colwise, Inputs, Rowwise, SequenceStyle
from legoai.specs.models.manifests.manifest import Manifest, ModuleInfo


@dataclass(frozen=True, slots=True)
class ShardedLayers:
    """Cut linear layers by path.

    Attributes:
        take_whole: those whose input is surely whole.
        sum_up: those that give summands, each with the layout that their sum has.
        gather_again: those whose input is kept in pieces, and whose communication in backward may be hidden.
    """

    take_whole: frozenset[str] = frozenset()
    sum_up: Mapping[str, Layout] = field(default_factory=dict)
    gather_again: frozenset[str] = frozenset()


NONE_CUT: Final = ShardedLayers()


@fact
def cut_layers(analysis: Analysis) -> ShardedLayers:
    """The cut linear layers of a plan.

    Raises:
        Undecided: a style or the number of ranks is a hole.
    """
    manifest = analysis.manifest
    styles = tensor_parallel(analysis).styles
    if manifest is None or not styles:
        return NONE_CUT
    along_sequence = any(_cuts_tensors(rule.treatment) for rule in styles.values())
    take_whole, sum_up = [], {}
    for path, rule in styles.items():
        style = rule.treatment
        if manifest.modules[path].kind != "linear":
            continue
        if isinstance(style, Rowwise):
            sum_up[path] = style.output if style.output is not None else Replicated()
        elif isinstance(style, Colwise):
            # Of a DTensor that is cut otherwise torch may gather the weight instead.
            around = styles.get(path.rpartition(".")[0])
            if not along_sequence or style.input is not None or _converts(around):
                take_whole.append(path)
    again = frozenset(layer for together in possibly_overlapped(analysis).values() for layer in together)
    return ShardedLayers(frozenset(take_whole), sum_up, again)


@fact
def layers_of_pieces(analysis: Analysis) -> frozenset[str]:
    """Modules whose whole weights meet a piece of the sequence, as far as styles on `tp` are decided."""
    shard = analysis.plan.shard_on("tp")
    if shard is None:
        return frozenset()
    found = analysis.assigned(shard).by_path.items()
    return frozenset(path for path, rule in found if isinstance(rule.treatment, SequenceStyle))


def children(manifest: Manifest, path: str) -> Iterator[ModuleInfo]:
    """The modules that a module holds directly."""
    module = manifest.modules[path]
    for name in module.children:
        yield manifest.modules[module.child_path(name)]


def _cuts_tensors(style: Any) -> bool:
    """Whether what a style gives may be cut along another dim than features."""
    return isinstance(style, SequenceStyle) or isinstance(getattr(style, "output", None), Sharded)


def _converts(rule: PathRule[Any] | None) -> bool:
    """Whether a module's first input is made whole."""
    if rule is None or not isinstance(rule.treatment, Inputs):
        return False
    return isinstance(as_list(rule.treatment.target)[0], Replicated)
