"""Modules compiled by torch.compile, and their options."""

from __future__ import annotations

from typing import Any, Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.facts import following, holders, is_within
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.compile import AotEager, Inductor

WITHOUT_CUDA_GRAPHS: Final = {"reduce_overhead": "default", "max_autotune": "max_autotune_no_cudagraphs"}
"""Modes that launch a module's kernels as one CUDA graph, each with the mode that is the same without."""

AUTOTUNED: Final = ("max_autotune", "max_autotune_no_cudagraphs")
"""Modes that choose kernels by measuring them."""


@fact
def compiled_modules(analysis: Analysis) -> dict[str, PathRule[Any]]:
    """The modules that are compiled, in the model's order, each with its rule.

    Raises:
        Undecided: a rule's treatment is a hole.
    """
    return following(analysis, analysis.plan.compile, (Inductor, AotEager))


@fact
def compiles_only_blocks(analysis: Analysis) -> bool:
    """Whether every compiled module is a block or inside of one, so that nothing around blocks is compiled.

    Raises:
        Undecided: a rule's treatment is a hole.
    """
    lists = () if analysis.manifest is None else analysis.manifest.block_lists
    blocks = {path for item in lists for path in item.paths}
    return all(path in blocks or not blocks.isdisjoint(holders(path)) for path in compiled_modules(analysis))


@fact
def graphs_of_gathered(analysis: Analysis) -> dict[str, PathRule[Any]]:
    """Return modules that would be launched as CUDA graphs although units of `fsdp` gather their parameters.

    A CUDA graph contains the addresses of parameters, and units gather them to other addresses each time.

    Raises:
        Undecided: a rule's treatment is a hole.
    """
    fsdp, manifest, device = analysis.plan.fsdp, analysis.manifest, analysis.device
    if fsdp is None or fsdp.backend == "graph" or manifest is None or (device is not None and device.kind == "cpu"):
        return {}
    holders = {path.rpartition(".")[0] for path, _ in manifest.parameters()}
    return {
        path: rule
        for path, rule in compiled_modules(analysis).items()
        if isinstance(rule.treatment, Inductor)
        and rule.treatment.mode in WITHOUT_CUDA_GRAPHS
        and any(is_within(holder, path) for holder in holders)
    }
