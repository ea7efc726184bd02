"""`attention`: the kernel of attention."""

from __future__ import annotations

from typing import Final

from legoai.lowering.emit.base import Draft, Lowering

KERNELS: Final = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
}
"""The kernels of scaled dot-product attention, with the names that `torch.nn.attention.SDPBackend` gives them."""


def emit(lowering: Lowering, draft: Draft) -> None:
    """Emit the one kernel that the run may use."""
    attention = lowering.plan.attention
    if attention.kernel == "default":
        return
    draft.imports.name("torch.nn.attention", "SDPBackend")
    draft.train_with("attention_kernel", f"SDPBackend.{KERNELS[attention.kernel]}", lowering.note(attention, "kernel"))
