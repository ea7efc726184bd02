"""`batch`: the samples of a step, and the axes over which they are spread."""

from __future__ import annotations

from dataclasses import asdict

from legoai.dsl.analysis.batch import micro_batches, ramp_stages, samples_at_once
from legoai.dsl.analysis.parallelism.mesh import data_axes
from legoai.lowering.emit.base import Draft, Lowering
from legoai.lowering.emit.code import Line, call, literal, sequence
from legoai.lowering.emit.step import COUNT


def emit(lowering: Lowering, draft: Draft) -> None:
    """Add the batch, and the number of micro batches of a rank that follows from it."""
    batch = lowering.plan.batch
    draft.train_with("data_axes", literal(data_axes(lowering.analysis)), lowering.note(lowering.plan.mesh))
    count = micro_batches(lowering.plan)
    assert count is not None, "a plan without errors has a batch that divides"
    draft.step.micro_batches = Line(literal(count), f"{COUNT} = ", lowering.note(batch))
    for until, samples in ramp_stages(lowering.plan):
        draft.step.ramp.append((until, samples // samples_at_once(lowering.plan), lowering.note(batch, "ramp")))
    if batch.ramp is not None:
        stages = sequence([literal(stage) for stage in ramp_stages(lowering.plan)])
        draft.train_with("ramp", stages, lowering.note(batch, "ramp"))
    for field in ("global_batch", "micro_batch", "seq_len"):
        if getattr(batch, field) is not None:
            draft.train_with(field, literal(getattr(batch, field)), lowering.note(batch, field))
    reads = lowering.manifest.reads
    if reads is not None and not lowering.manifest.reads_tokens:
        name = draft.imports.name("legoai.specs.models.reads", type(reads).__name__)
        values = {field: literal(value) for field, value in asdict(reads).items()}
        draft.train_with("reads", call(name, **values), lowering.note(lowering.plan.model, "family"))
