"""Layers whose weights torch's own modules read without calling the layers, in a model that cannot be followed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.blocks import general
from legoai.dsl.analysis.facts import grouped
from legoai.specs.directives.base import PathRule


def read_by_attention(analysis: Analysis) -> Iterator[tuple[PathRule[Any], list[str]]]:
    """Yield the rules on `tp` for an `out_proj` of `nn.MultiheadAttention`, with the layers as a plan names them.

    Where forward can be followed, its flow shows that the weights are read.
    """
    manifest, shard = analysis.manifest, analysis.plan.shard_on("tp")
    if analysis.layouts is None or manifest is None or manifest.flow_error is None or shard is None:
        return
    read = (
        (path.removesuffix(".weight").removesuffix(".bias"), rule)
        for path, rule in analysis.assigned(shard).by_path.items()
    )
    for rule, paths in grouped(item for item in read if item[0].rpartition(".")[2] == "out_proj"):
        around = [manifest.modules.get(path.rpartition(".")[0]) for path in paths]
        if all(info is not None and info.torch_forward and info.class_name == "MultiheadAttention" for info in around):
            yield rule, list(dict.fromkeys(general(manifest, path) for path in paths))
