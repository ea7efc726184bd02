"""The families of directives, each with the function that emits it, in the order of emission."""

from __future__ import annotations

from typing import Final

from legoai.lowering.emit.computation import attention, checkpoint, loss, precision
from legoai.lowering.emit.computation import compile as compilation
from legoai.lowering.emit.data_parallelism import comm, fsdp, replicate
from legoai.lowering.emit.devices import allocator, cluster, mesh, offload
from legoai.lowering.emit.emitter import Emit
from legoai.lowering.emit.sharding import context, shard
from legoai.lowering.emit.stages import pipeline
from legoai.lowering.emit.training import batch, clip, model, optimizer, run, schedule

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
are converted before all else, though `precision` comes late (:mod:`legoai.lowering.emit.computation.float8`). What the
other families contribute has places of its own, in other functions and in the step."""
