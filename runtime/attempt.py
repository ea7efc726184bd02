"""Attempt of a run: one start of all its ranks, each of which torchrun may start again, and its name in the store.

torchrun's agents serve a store to the ranks, which outlives an attempt. There the ranks of a later attempt would read
what those of an earlier one have written, such as addresses where nothing listens any more. So the ranks agree on a
name first, and everything that they write there is under it. The count of restarts does not name an attempt of several
hosts: the agents of ranks that did not fail themselves may start them again without counting it.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from torch.distributed import DistStoreError, Store, TCPStore  # type: ignore[attr-defined]

_NUMBER: Final = "legoai/attempts"
_JOINING: Final = "legoai/joining"
_NAMED: Final = "legoai/named"
_HEARD: Final = "legoai/heard"
_COMPLETE: Final = "legoai/complete"
_PUBLISHED: Final = "legoai/attempt"

_POLL_SECONDS: Final = 0.01
"""Between the first two looks of rank 0 at who has joined; it then looks more and more seldom."""

_LONGEST_POLL_SECONDS: Final = 0.5


@dataclass(slots=True)
class _Attempt:
    number: int | None = None


_of_process: Final = _Attempt()


def launcher_store(environment: Mapping[str, str] = os.environ) -> TCPStore | None:
    """Connect to the launcher's store, which exists before and after the process group."""
    try:
        return TCPStore(
            environment["MASTER_ADDR"],
            int(environment["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=5),
        )
    except (RuntimeError, KeyError, ValueError):
        return None


def store_outlives_ranks() -> bool:
    """Return whether torchrun's agents serve the store, and not rank 0, whose store ends with it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def attempt() -> str:
    """Return the name of this process's attempt: until its ranks have agreed on one, by the count of restarts."""
    number = _of_process.number
    return _by_count(os.environ) if number is None else _by_number(number)


def attempt_key(name: str) -> str:
    """Return a key of this attempt in the launcher's store."""
    return f"{name}/{attempt()}"


def published_attempt(store: Store, environment: Mapping[str, str]) -> str:
    """Return the name of the attempt of a rank with this environment, as another process finds it in the store.

    Raises:
        RuntimeError: the store is gone.
    """
    key = _published_key(environment)
    return str(store.get(key).decode()) if store.check([key]) else _by_count(environment)


def is_restart() -> bool:
    """Return whether torchrun has started ranks of this run before, as far as this rank can see."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 or (_of_process.number or 1) > 1


def agree_on_attempt(store: Store, *, rank: int, world_size: int, timeout: timedelta) -> str:
    """Give this attempt a name that no other has in the store, and return it on every rank.

    Rank 0 takes a new number. Of what it finds in the store it cannot know which ranks are of an earlier attempt: it
    answers all, each by a mark which only that process waits for, until all ranks of this attempt have heard it.

    Raises:
        DistStoreError: not all ranks have joined within the timeout, or the store is gone.
    """
    if rank == 0:
        number = store.add(_NUMBER, 1)
        _answer_all(store, number, world_size, timeout)
        store.set(f"{_COMPLETE}/{number}", "")
    else:
        mark, until = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
        store.set(f"{_JOINING}/{rank}", mark)
        number = int(store.get(f"{_NAMED}/{mark}"))
        store.set(f"{_HEARD}/{number}/{rank}", "")
        left = max(1.0, until - time.monotonic())
        store.wait([f"{_COMPLETE}/{number}"], timedelta(seconds=left))
    _of_process.number = number
    store.set(_published_key(os.environ), attempt())
    return attempt()


def _answer_all(store: Store, number: int, world_size: int, timeout: timedelta) -> None:
    if world_size == 1:
        return
    until, seconds = time.monotonic() + timeout.total_seconds(), _POLL_SECONDS
    keys, answered = [f"{_JOINING}/{rank}" for rank in range(1, world_size)], set[bytes]()
    heard = [f"{_HEARD}/{number}/{rank}" for rank in range(1, world_size)]
    store.wait(keys, timeout)
    while True:
        if marks := [mark for mark in store.multi_get(keys) if mark not in answered]:
            store.multi_set([f"{_NAMED}/{mark.decode()}" for mark in marks], [str(number)] * len(marks))  # type: ignore[attr-defined]
            answered.update(marks)
        if store.check(heard):
            return
        if time.monotonic() > until:
            raise DistStoreError(f"timed out after {timeout.total_seconds():g} s, in which not all ranks have joined")
        time.sleep(seconds)
        seconds = min(2 * seconds, _LONGEST_POLL_SECONDS)


def _published_key(environment: Mapping[str, str]) -> str:
    return f"{_PUBLISHED}/{environment.get('RANK', '0')}/{_by_count(environment)}"


def _by_count(environment: Mapping[str, str]) -> str:
    return f"after {environment.get('TORCHELASTIC_RESTART_COUNT', '0')} restarts"


def _by_number(number: int) -> str:
    return f"attempt {number}"
