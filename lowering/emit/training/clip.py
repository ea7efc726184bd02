"""`clip`: the bound on gradients."""

from __future__ import annotations

from legoai.lowering.emit.base import Draft, Lowering
from legoai.lowering.emit.code import Line, call
from legoai.lowering.emit.step import PARAMETERS


def emit(lowering: Lowering, draft: Draft) -> None:
    """Clip the gradients before the update; checkpoints record the bound."""
    clip = lowering.plan.clip
    if clip is not None:
        draft.imports.name("legoai.runtime", "clip_gradients")
        norm, note = lowering.number(clip, "norm"), lowering.note(clip, "norm")
        made = call("clip_gradients", PARAMETERS, max_norm=norm, total_norm="result.norm")
        draft.step.clip.append(Line(made, "", note))
        draft.train_with("clip_norm", norm, note)
