"""`attention`: the kernel of scaled dot-product attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from legoai.specs.directives.base import Directive, option
from legoai.specs.directives.kinds import Choice


class Attention(Directive):
    """The attention kernel (`sdpa_kernel`). What it saves for the backward pass decides as much memory as a mesh."""

    keyword: ClassVar[str] = "attention"
    subject: ClassVar[str | None] = "kernel"
    absent: ClassVar[Mapping[str, Any] | None] = {}

    kernel: str = option(
        Choice(("default", "flash", "efficient", "cudnn", "math", "flex")),
        doc="`default` leaves the choice to PyTorch: on H100, H200 and B200 it is `cudnn`, on A100 `flash`, for heads "
        "that these take. Where `context` merges attention to the pieces of a sequence, the choice is the same, but it "
        "is never `efficient`: it is `flash`, which pads values to the width of keys, or matrix products for tensors "
        "that neither takes.",
        default="default",
    )
