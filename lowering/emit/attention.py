"""`attention`: by which kernel is attention computed?"""

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
    """Say the one kernel that the run may use."""
    attention = lowering.plan.attention
    if attention.kernel == "default":
        return
    backend = KERNELS.get(attention.kernel)
    if backend is None:
        lowering.refuse(
            lowering.place(attention, "kernel"),
            f"`attention {attention.kernel}` is not lowered yet: the models call `scaled_dot_product_attention`, which "
            "has no such kernel",
            help=[f"lowered are {', '.join(f'`{name}`' for name in ('default', *KERNELS))}"],
        )
        return
    draft.imports.name("torch.nn.attention", "SDPBackend")
    draft.train_with("attention_kernel", f"SDPBackend.{backend}", lowering.note(attention, "kernel"))
