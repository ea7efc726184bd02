"""On-disk cache of the action orders of torch's pipeline schedules.

Importing `torch.distributed.pipelining` to compute them takes seconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

from legoai.cost.code_state import state_of_code
from legoai.cost.replay.store import keep_bytes, kept_bytes

_FOLDER: Final = "orders"


class Action(NamedTuple):
    """Action of a stage for one micro batch; its kind is `F`, `B`, or a half of a split backward, `I` or `W`."""

    stage: int
    kind: str
    micro_batch: int


Listed: TypeAlias = tuple[tuple[Action, ...], ...]
"""Actions of each rank, in its order."""


def kept_or_listed(
    name: str, held: Sequence[Sequence[int]], micro_batches: int, listed: Callable[[], Listed]
) -> Listed:
    """Return the actions of a schedule's ranks in a pass, from the cache, or from ``listed`` on a miss.

    Args:
        name: name of the schedule.
        held: the stages of each rank.
        micro_batches: micro batches of a pass.
        listed: computes the actions with torch; its result is cached.
    """
    parts = [name, held, micro_batches, state_of_code("cost/search/stages")]
    key = f"{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}.json"
    kept = kept_bytes(_FOLDER, key)
    if kept is not None:
        return tuple(tuple(Action(*item) for item in actions) for actions in json.loads(kept))
    found = listed()
    keep_bytes(_FOLDER, key, json.dumps(found, separators=(",", ":")).encode())
    return found
