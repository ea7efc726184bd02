"""The families of directives, each with the function that emits it, in the order of emission."""

from __future__ import annotations

from typing import Final

from legoai.lowering.emit import (
    allocator,
    attention,
    batch,
    checkpoint,
    clip,
    cluster,
    comm,
    context,
    fsdp,
    loss,
    mesh,
    model,
    offload,
    optimizer,
    pipeline,
    precision,
    replicate,
    run,
    schedule,
    shard,
)
from legoai.lowering.emit import compile as compilation
from legoai.lowering.emit.emitter import Emit

EMITTERS: Final[dict[str, Emit]] = {
    "model": model.emit,
    "cluster": cluster.emit,
    "mesh": mesh.emit,
    "pipeline": pipeline.emit,
    "shard": shard.emit,
    "context": context.emit,
    "checkpoint": checkpoint.emit,
    "compile": compilation.emit,
    "fsdp": fsdp.emit,
    "replicate": replicate.emit,
    "comm": comm.emit,
    "offload": offload.emit,
    "allocator": allocator.emit,
    "attention": attention.emit,
    "optimizer": optimizer.emit,
    "schedule": schedule.emit,
    "batch": batch.emit,
    "precision": precision.emit,
    "loss": loss.emit,
    "clip": clip.emit,
    "data": run.emit_data,
    "weights": run.emit_weights,
    "steps": run.emit_steps,
    "seed": run.emit_seed,
    "save": run.emit_save,
    "evaluate": run.emit_evaluate,
}
"""Keyword to emission. Calls stand in `parallelize` in the order of emission, which is TorchTitan's: tensor parallel,
experts, context parallel, activation checkpointing, compile, data sharding. One call stands elsewhere: float8 layers
are converted before all else, though `precision` comes late (:mod:`legoai.lowering.emit.float8`). What the other
families contribute has places of its own, in other functions and in the step."""
