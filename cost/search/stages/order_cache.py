"""On-disk cache of the action orders of torch's pipeline schedules.

Importing `torch.distributed.pipelining` to compute them takes seconds.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from legoai.cost.code_state import state_of_code
from legoai.cost.replay.store import keep_bytes, kept_bytes
from legoai.dsl.analysis.stages.orders import COMPUTE

_FOLDER: Final = "orders"
_KINDS: Final = tuple(sorted(COMPUTE))


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
        try:
            return tuple(_read(json.loads(kept), held, micro_batches))
        except ValueError:
            pass  # a damaged entry, which is overwritten
    found = listed()
    rows = [[[item.stage, _KINDS.index(item.kind), item.micro_batch] for item in actions] for actions in found]
    keep_bytes(_FOLDER, key, json.dumps(rows, separators=(",", ":")).encode())
    return found


def _read(rows: Any, held: Sequence[Sequence[int]], micro_batches: int) -> Iterator[tuple[Action, ...]]:
    """Yield the actions of each rank.

    Raises:
        ValueError: the entry does not hold actions of these ranks.
    """
    if not isinstance(rows, list):
        raise ValueError("no list of ranks")
    for row, stages in itertools.zip_longest(rows, held):
        if not isinstance(row, list) or stages is None:
            raise ValueError("other ranks")
        yield tuple(_action(item, stages, micro_batches) for item in row)


def _action(item: Any, stages: Sequence[int], micro_batches: int) -> Action:
    if not isinstance(item, list) or len(item) != 3 or any(type(number) is not int for number in item):
        raise ValueError("no action")
    stage, kind, micro_batch = item
    if stage not in stages or not 0 <= kind < len(_KINDS) or not 0 <= micro_batch < micro_batches:
        raise ValueError("an action of no such stage")
    return Action(stage, _KINDS[kind], micro_batch)
