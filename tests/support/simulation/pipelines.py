"""Programs of small pipelines: two ranks, and four with two equal ones in the middle."""

from __future__ import annotations

from pathlib import Path

from legoai.api import lower
from legoai.lowering.program import Program

TWO = """\
plan tiny

model     llama3("tiny")
cluster   cpu(devices = {ranks})
batch     (global = {batch}, micro = 2, seq_len = 16)
optimizer adamw(lr = 1e-2)
clip      (norm = 1.0)
"""
KEPT = "fsdp on dp_shard { layers.* = unit(reshard = after_backward), root = unit }\nprecision (param = bf16)\n"
MICRO_BATCHES = 8

FOUR = """\
plan tiny

model     llama3("tiny", n_layers = {layers})
cluster   cpu(devices = {ranks})
batch     (global = {batch}, micro = 2, seq_len = 16)
optimizer adamw(lr = 1e-2)
clip      (norm = 1.0)
mesh      (pp = 4{more})
{body}pipeline on pp (schedule = {schedule}, microbatches = {micro_batches})
"""


def two_ranks(
    folder: Path,
    schedule: str,
    *,
    sharded: bool = False,
    micro_batches: int = MICRO_BATCHES,
    reshard: str = "after_backward",
    passes: int = 1,
    axis: str = "",
    body: str = "",
) -> Program:
    """A program of a pipeline of the tiny model, on two ranks, or on two times two that also shard it.

    With an axis there are twice as many, and ``body`` says what is done on it.
    """
    replicas = 2 if sharded else 1
    head = TWO.format(batch=2 * micro_batches * replicas * passes, ranks=2 * replicas * (2 if axis else 1))
    mesh = f"mesh (pp = 2{', dp_shard = 2' if sharded else ''}{f', {axis} = 2' if axis else ''})\n"
    file = folder / "tiny.plan"
    units = KEPT.replace("after_backward", reshard) if sharded else ""
    options = f"schedule = {schedule}, microbatches = {micro_batches}"
    file.write_text(f"{head}{mesh}{units}{body}pipeline on pp ({options})\n")
    return lower(file)


def four_ranks(
    folder: Path,
    schedule: str,
    *,
    sharded: bool = False,
    traced: bool = False,
    layers: int = 14,
    body: str = "",
    passes: int = 1,
    micro_batches: int = MICRO_BATCHES,
) -> Program:
    """A program of four pipeline ranks, of which the middle two are equal."""
    shards = 2 if sharded else 1
    file = folder / "tiny.plan"
    units = KEPT.replace("on dp_shard {", "on dp_shard (backend = graph) {") if traced else KEPT
    more, body = (", dp_shard = 2", units + body) if sharded else ("", body)
    batch = {"ranks": 4 * shards, "batch": 2 * micro_batches * shards * passes, "micro_batches": micro_batches}
    file.write_text(FOUR.format(layers=layers, more=more, body=body, schedule=schedule, **batch))
    return lower(file)
