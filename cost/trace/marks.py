"""Names of marks in a trace."""

from __future__ import annotations

from typing import Final

ACTION: Final = "action "
"""Before an action of a pipeline stage, such as `action 3F7`; the name is that of `torch.distributed.pipelining`."""

END_ACTION: Final = "end action "
"""Behind it."""

BACKWARD_ACTION: Final = "action backward "
"""Before a backward in an excerpt of a trace (:mod:`legoai.cost.pipelines.excerpt`)."""

ACTION_APART: Final = "action apart "
"""Before an action of an excerpt that belongs to no micro batch."""

GATHER_APART: Final = "action apart gather "
"""Before such an action that all-gathers or frees parameters."""

BATCH: Final = "batch"
"""Before sends and receives that are issued as one batch."""

END_BATCH: Final = "end batch"
"""Behind them."""

MICRO_BATCH: Final = "micro batch "
"""Before a micro batch outside pipelines; its number follows."""
