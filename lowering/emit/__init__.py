"""The families of directives in the order in which a program applies them, each with the function that emits it."""

from __future__ import annotations

from typing import Final

from legoai.lowering.emit import (
    attention,
    batch,
    checkpoint,
    clip,
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
    schedule,
    shard,
)
from legoai.lowering.emit import compile as compilation
from legoai.lowering.emit.base import Draft, Lowering
from legoai.lowering.emit.emitter import Emit


def _in_the_header(lowering: Lowering, draft: Draft) -> None:
    """Nothing: the cluster stands in the program's docstring, with the command that starts the program on it."""


EMITTERS: Final[dict[str, Emit]] = {
    "model": model.emit,
    "cluster": _in_the_header,
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
    "attention": attention.emit,
    "optimizer": optimizer.emit,
    "schedule": schedule.emit,
    "batch": batch.emit,
    "precision": precision.emit,
    "loss": loss.emit,
    "clip": clip.emit,
}
"""Keyword to emission. The model is changed in TorchTitan's order: mesh, pipeline split, tensor parallel, context
parallel, activation checkpointing, compile, data sharding; then come the optimizer and what the training loop has to
know."""
