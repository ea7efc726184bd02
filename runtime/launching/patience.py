"""Waiting for work of rank 0 that may take longer than ranks wait in a collective, such as building a corpus.

The other ranks ask the launcher's store whether it is done. If rank 0 ends before, the launcher ends them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from legoai.runtime.attempt import attempt_key, launcher_store
from legoai.runtime.launching.attendant import interval
from legoai.runtime.process_group import on_first_rank

Result = TypeVar("Result")

_DONE: Final = "legoai/done"
_FIRST_SECONDS: Final = 0.05
"""Between the first two questions of a rank; it then asks more and more seldom."""


def patiently_on_first_rank(name: str, function: Callable[[], Result]) -> Result:
    """Call a function on rank 0, however long it takes, and return its result, or raise its error, on every rank.

    Args:
        name: of the work, which a run does once.
        function: the work.
    """
    store = launcher_store() if dist.get_world_size() > 1 else None
    key = attempt_key(f"{_DONE}/{name}")

    def done() -> Result:
        try:
            return function()
        finally:
            if store is not None:
                store.set(key, "done")

    if store is not None and dist.get_rank() != 0:
        _wait(store, key)
    return on_first_rank(done)


def _wait(store: TCPStore, key: str) -> None:
    seconds = _FIRST_SECONDS
    try:
        while not store.check([key]):
            time.sleep(seconds)
            seconds = min(2 * seconds, interval())
    except RuntimeError:
        return  # the launcher is gone, and ends this rank
