"""How are the points of a pipeline's trace named?"""

from __future__ import annotations

from typing import Final

ACTION: Final = "action "
"""Before an action of a stage, such as `action 3F7`; the name is that of `torch.distributed.pipelining`."""

END_ACTION: Final = "end action "
"""Behind it."""

BATCH: Final = "batch"
"""Before sends and receives that are issued as one operation."""

END_BATCH: Final = "end batch"
"""Behind them."""
