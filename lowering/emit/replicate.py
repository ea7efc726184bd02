"""`replicate`: how are the gradients of whole replicas averaged?

The program uses that `replicate` of torch which shares its machinery with `fully_shard`: it composes with tensor
parallel, with activation checkpointing and with pipeline stages, and leaves the names of parameters as they are.
"""

from __future__ import annotations

from legoai.lowering.emit.base import Draft, Lowering
from legoai.lowering.emit.buckets import DTYPE_BYTES, Bucket, fill, local_numel, pieces, statements
from legoai.lowering.emit.code import Line, Node, Note, Statement, call
from legoai.lowering.emit.mesh import joined
from legoai.lowering.emit.precision import policy
from legoai.lowering.emit.stages import is_staged
from legoai.specs.directives.replicate import ReplicateUse


def emit(lowering: Lowering, draft: Draft) -> None:
    """Add `apply_replicate`, which makes a replica of each bucket, and of the model for what no bucket holds."""
    replicate = lowering.plan.replicate
    if replicate is None:
        return
    if lowering.plan.fsdp is not None:
        lowering.refuse(
            lowering.place(replicate),
            "`replicate` and `fsdp` cannot hold the same parameters",
            label="replicas of shards",
            help=["write `fsdp on dp_replicate, dp_shard`, which shards and replicates"],
        )
        return
    draft.imports.name("torch.distributed._composable.replicate_with_fsdp", "replicate")

    def make(module: str) -> Node:
        return call("replicate", module, mesh="mesh", mp_policy="policy")

    body: list[Statement] = [Line(policy(lowering, draft), "policy = ", lowering.note(lowering.plan.precision))]
    note = lowering.note(replicate, "bucket")
    body += statements(lowering, buckets(lowering, replicate, note), make)
    body.append(Line(make("model"), "", lowering.note(replicate)))
    draft.apply("apply_replicate", mesh=joined(draft, _axes(lowering)), body=body, note=lowering.note(replicate))


def replica_axis(lowering: Lowering) -> str:
    """The name of the axis of the mesh along which all hold the same parameters."""
    return "_".join(_axes(lowering))


def _axes(lowering: Lowering) -> tuple[str, ...]:
    """The axes along which all hold the same parameters: those of `cp` see other tokens of the same sequences."""
    assert lowering.plan.replicate is not None
    return (*lowering.plan.replicate.axes, *(("cp",) if lowering.plan.mesh.cp > 1 else ()))


def buckets(lowering: Lowering, replicate: ReplicateUse, note: Note) -> list[Bucket]:
    """Buckets of blocks, filled from the end of the model, where gradients are ready first.

    What the last bucket is too small for is left to the model as a whole, and so are modules that share a parameter.
    """
    if is_staged(lowering):
        return _of_stages(lowering, replicate, note)
    size = DTYPE_BYTES[lowering.plan.precision.reduce]
    tied = {path for paths in lowering.manifest.tied_parameters for path in paths}
    sizes = [
        (path, local_numel(lowering, path) * size)
        for path in reversed(pieces(lowering))
        if not any(parameter.startswith(f"{path}.") for parameter in tied)
    ]
    filled = fill([(path, held) for path, held in sizes if held], replicate.bucket)
    if filled and sum(held for path, held in sizes if path in filled[-1]) < replicate.bucket:
        filled.pop()
    return [Bucket(tuple(reversed(paths)), note) for paths in reversed(filled)]


def _of_stages(lowering: Lowering, replicate: ReplicateUse, note: Note) -> list[Bucket]:
    """Each block for itself: a stage reduces its gradients after the last micro batch, with nothing to overlap."""
    if replicate.origin("bucket").decider != "default":
        lowering.refuse(
            lowering.place(replicate, "bucket"),
            "`bucket` has no effect under a pipeline: a stage reduces its gradients after its last micro batch",
            label="no effect in this plan",
            help=["leave `bucket` out"],
        )
    blocks = {
        f"{blocks.path}.{name}" if blocks.path else name
        for blocks in lowering.manifest.block_lists
        for name in blocks.names
    }
    return [Bucket((path,), note) for path in pieces(lowering) if path in blocks]
