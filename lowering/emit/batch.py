"""`batch`: how many sequences does a step see, and on which axes are they spread?"""

from __future__ import annotations

from legoai.lowering.emit.base import Draft, Lowering
from legoai.lowering.emit.code import literal
from legoai.lowering.emit.mesh import data_axes


def emit(lowering: Lowering, draft: Draft) -> None:
    """Say the batch; the number of accumulated micro batches follows from it."""
    batch = lowering.plan.batch
    draft.train_with("data_axes", literal(data_axes(lowering)), lowering.note(lowering.plan.mesh))
    for field in ("global_batch", "micro_batch", "seq_len"):
        draft.train_with(field, literal(getattr(batch, field)), lowering.note(batch, field))
