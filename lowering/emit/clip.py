"""`clip`: the bound on gradients."""

from __future__ import annotations

from legoai.lowering.emit.base import Draft, Lowering
from legoai.lowering.emit.code import literal


def emit(lowering: Lowering, draft: Draft) -> None:
    """Say the largest norm."""
    clip = lowering.plan.clip
    if clip is not None:
        draft.train_with("clip_norm", literal(clip.norm), lowering.note(clip, "norm"))
