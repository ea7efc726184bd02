"""Replicas of `replicate`: the axes along which they lie, and the buckets of their gradients."""

from __future__ import annotations

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.parallelism.buckets import ModuleBucket, fill, local_numel
from legoai.dsl.analysis.parallelism.parameter_reads import bypassed, is_read_from_above
from legoai.specs.directives.replicate import ReplicateUse
from legoai.specs.dtypes import DTYPE_BYTES


def replicas(analysis: Analysis) -> ReplicateUse | None:
    """The `replicate` statement where it has an effect: beside `fsdp` it has ranks only by mistake."""
    return analysis.plan.replicate if analysis.plan.fsdp is None else None


def replica_axes(analysis: Analysis) -> tuple[str, ...]:
    """Return the axes along which all ranks hold the same parameters; ranks of `cp` see other tokens."""
    replicate = replicas(analysis)
    if replicate is None:
        return ()
    return (*replicate.axes, *(("cp",) if analysis.plan.mesh.cp > 1 else ()))


@fact
def gradient_buckets(analysis: Analysis) -> tuple[ModuleBucket, ...]:
    """Return buckets of blocks, filled from the end of the model, where gradients are ready first.

    The remainder of the last bucket belongs to the model as a whole, and so do modules that share parameters, or whose
    parameters are read without a call of them, or that are bypassed. Under a pipeline each block is a bucket: a stage
    reduces its gradients after the last micro batch, with nothing to overlap.
    """
    replicate, manifest, plan = replicas(analysis), analysis.manifest, analysis.plan
    if replicate is None:
        return ()
    assert manifest is not None
    span = replicate.origin("bucket").span or replicate.origin("keyword").span
    if plan.pipeline is not None and plan.mesh.pp > 1:
        blocks = {path for item in manifest.block_lists for path in item.paths}
        return tuple(ModuleBucket((path,), span) for path in _pieces(analysis) if path in blocks)
    size = DTYPE_BYTES[plan.precision.reduce]
    tied = {path for paths in (*manifest.tied_parameters, *manifest.shared_modules) for path in paths}
    sizes = [
        (path, local_numel(analysis, path) * size)
        for path in reversed(_pieces(analysis))
        if not any(parameter.startswith(f"{path}.") for parameter in tied)
        and not is_read_from_above(analysis, path)
        and path not in bypassed(analysis)
    ]
    filled = fill([(path, held) for path, held in sizes if held], replicate.bucket)
    if filled and sum(held for path, held in sizes if path in filled[-1]) < replicate.bucket:
        filled.pop()
    return tuple(ModuleBucket(tuple(reversed(paths)), span) for paths in reversed(filled))


def _pieces(analysis: Analysis) -> list[str]:
    """Return the modules of which buckets are made, in model order: its blocks, and the modules outside them."""
    assert analysis.manifest is not None
    modules = analysis.manifest.modules
    lists = {blocks.path for blocks in analysis.manifest.block_lists}

    def cut(path: str) -> list[str]:
        info = modules[path]
        holds_blocks = path == "" or path in lists or any(held.startswith(f"{path}.") for held in lists)
        if holds_blocks or info.class_name in ("ModuleDict", "ModuleList"):
            return [piece for name in info.children for piece in cut(info.child_path(name))]
        return [path]

    return cut("")
