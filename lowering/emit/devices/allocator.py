"""`allocator`: settings of the device's allocator, which the trainer applies before any allocation."""

from __future__ import annotations

from legoai.lowering.emit.base import Draft, Lowering
from legoai.lowering.emit.code import quoted


def emit(lowering: Lowering, draft: Draft) -> None:
    """Emit the settings, which override the environment's."""
    allocator = lowering.plan.allocator
    if allocator is not None:
        settings = f"expandable_segments:{allocator.expandable_segments}"
        draft.train_with("allocator_settings", quoted(settings), lowering.note(allocator, "expandable_segments"))
