"""`batch`: how many samples does a step see, what are they, and on which axes are they spread?"""

from __future__ import annotations

from dataclasses import asdict

from legoai.dsl.analysis.mesh import data_axes
from legoai.lowering.emit.base import Draft, Lowering
from legoai.lowering.emit.code import call, literal
from legoai.specs.models.reads import Tokens


def emit(lowering: Lowering, draft: Draft) -> None:
    """Say the batch; the number of accumulated micro batches follows from it."""
    batch = lowering.plan.batch
    draft.train_with("data_axes", literal(data_axes(lowering.analysis)), lowering.note(lowering.plan.mesh))
    for field in ("global_batch", "micro_batch", "seq_len"):
        if getattr(batch, field) is not None:
            draft.train_with(field, literal(getattr(batch, field)), lowering.note(batch, field))
    reads = lowering.manifest.reads
    if reads is not None and not isinstance(reads, Tokens):
        name = draft.imports.name("legoai.specs.models.reads", type(reads).__name__)
        values = {field: literal(value) for field, value in asdict(reads).items()}
        draft.train_with("reads", call(name, **values), lowering.note(lowering.plan.model, "family"))
