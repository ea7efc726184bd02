"""`allocator`: how PyTorch's allocator takes the device's memory."""

from __future__ import annotations

from typing import ClassVar

from legoai.specs.directives.base import Directive, option
from legoai.specs.directives.kinds import Boolean


class Allocator(Directive):
    """Settings of CUDA's caching allocator. Without it those of the environment hold, `PYTORCH_ALLOC_CONF`."""

    keyword: ClassVar[str] = "allocator"

    expandable_segments: bool = option(
        Boolean(),
        doc=(
            "One segment for each stream, which grows by pages of 20 MiB, in place of one for each large request: what "
            "is free is joined, so that mostly less is reserved beyond what is active."
        ),
    )
