"""`replicate`: the function that makes replicas, whose gradients are averaged in buckets.

The program uses the `replicate` of torch that shares its implementation with `fully_shard`: it composes with tensor
parallelism, activation checkpointing and pipeline stages, and keeps the names of parameters.
"""

from __future__ import annotations

from typing import Final

from legoai.dsl.analysis.parallelism.replicate import gradient_buckets, replica_axes, replicas
from legoai.lowering.emit.base import Draft, Lowering
from legoai.lowering.emit.code import Line, Node, Statement, call
from legoai.lowering.emit.computation.precision import policy
from legoai.lowering.emit.data_parallelism.buckets import statements
from legoai.lowering.emit.devices.mesh import joined

_WHY: Final = "after all wrappers, so that the hooks that reduce gradients enclose them"


def emit(lowering: Lowering, draft: Draft) -> None:
    """Add `apply_replicate`, which makes a replica of each bucket, and of the model for the remaining parameters."""
    replicate = replicas(lowering.analysis)
    if replicate is None:
        return
    draft.imports.name("torch.distributed._composable.replicate_with_fsdp", "replicate")

    def make(module: str) -> Node:
        return call("replicate", module, mesh="mesh", mp_policy="policy")

    body: list[Statement] = [Line(policy(lowering, draft), "policy = ", lowering.note(lowering.plan.precision))]
    body += statements(lowering, gradient_buckets(lowering.analysis), make)
    body.append(Line(make("model"), "", lowering.note(replicate)))
    draft.apply(
        "apply_replicate",
        mesh=joined(draft, replica_axes(lowering.analysis)),
        body=body,
        note=lowering.note(replicate),
        why=_WHY,
    )
