"""`cluster`: the device type of the program; its docstring states the rest, with the command to start it."""

from __future__ import annotations

from legoai.lowering.emit.base import Draft, Lowering
from legoai.lowering.emit.code import quoted


def emit(lowering: Lowering, draft: Draft) -> None:
    """Emit the type of device that the plan is for."""
    device = lowering.analysis.device
    if device is not None:
        draft.train_with("device_type", quoted(device.kind), lowering.note(lowering.plan.cluster))
