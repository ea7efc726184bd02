"""`allocator`: settings of PyTorch's device memory allocator."""

from __future__ import annotations

from typing import ClassVar

from legoai.specs.directives.base import Directive, option
from legoai.specs.directives.kinds import Boolean


class Allocator(Directive):
    """Settings of CUDA's caching allocator. By default those of the environment hold, `PYTORCH_ALLOC_CONF`."""

    keyword: ClassVar[str] = "allocator"

    expandable_segments: bool = option(
        Boolean(),
        doc=(
            "One segment for each stream, which grows by pages of 20 MiB, instead of one for each large request: free "
            "memory is contiguous, so that usually less is reserved beyond what is active."
        ),
    )
