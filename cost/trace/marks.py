"""Names of marks in a trace."""

from __future__ import annotations

from typing import Final

ACTION: Final = "action "
"""Before an action of a stage, such as `action 3F7`; the name is that of `torch.distributed.pipelining`."""

END_ACTION: Final = "end action "
"""Behind it."""

BACKWARD_ACTION: Final = "action backward "
"""Before a backward in a trace of actions that each stand there once."""

ACTION_APART: Final = "action apart "
"""Before what is done for no micro batch in such a trace."""

GATHER_APART: Final = "action apart gather "
"""Before such where parameters are gathered or freed."""

BATCH: Final = "batch"
"""Before sends and receives that are issued as one operation."""

END_BATCH: Final = "end batch"
"""Behind them."""

MICRO_BATCH: Final = "micro batch "
"""Before a micro batch outside of pipelines; its number follows."""
