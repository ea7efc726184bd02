"""`attention`: the kernel of scaled dot-product attention."""

from __future__ import annotations

from typing import ClassVar

from legoai.specs.directives.base import Directive, option
from legoai.specs.directives.kinds import Choice


class Attention(Directive):
    """The attention kernel (`sdpa_kernel`). What it saves for the backward pass decides as much memory as a mesh."""

    keyword: ClassVar[str] = "attention"
    subject: ClassVar[str | None] = "kernel"

    kernel: str = option(
        Choice(("default", "flash", "efficient", "cudnn", "math", "flex")),
        doc="`default` leaves the choice to PyTorch; where `context` merges attention to the pieces of a sequence, it "
        "is `flash`, or matrix products for tensors that `flash` does not take.",
        default="default",
    )
