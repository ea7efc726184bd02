"""Thread of a rank that serves its launcher: it answers roll calls, and ends the rank when the launcher is gone.

When a collective times out, the rank that waited queries all ranks over the launcher's store. A rank that is busy, or
that waits in a collective too, answers from this thread; a stopped process or a lost host does not.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from datetime import timedelta
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from legoai.runtime.launching.signals import end_with_parent, raise_at_interruptions

INTERVAL_SECONDS: Final = 2.0
"""Between two looks of the thread, in a world of up to 500 ranks; more ranks look more seldom."""

ORPHAN_SECONDS: Final = 120.0
"""Seconds that a rank has to finish its step and save when its launcher is gone."""

_CALL: Final = "legoai/roll-call"
_HERE: Final = "legoai/here"


def attend() -> None:
    """Start the thread, if torchrun has started this process; the thread ends before the interpreter does.

    If the interpreter's exit interrupted the thread within the store, the process would end with `std::terminate`, and
    a complete run would be reported as failed.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    raise_at_interruptions()
    end_with_parent(parent, signal.SIGTERM)
    leaving = threading.Event()
    thread = threading.Thread(target=_attend, args=(parent, leaving), name="legoai attendant", daemon=True)

    def leave() -> None:
        leaving.set()
        thread.join()

    atexit.register(leave)
    thread.start()


def _attend(parent: int, leaving: threading.Event) -> None:
    store, answered, orphaned = launcher_store(), False, None
    while not leaving.wait(interval()):
        if os.getppid() != parent and orphaned is None:
            orphaned = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)  # where the system did not do it: finish the step, save and leave
        if orphaned is not None and time.monotonic() - orphaned > ORPHAN_SECONDS:
            os._exit(128 + signal.SIGTERM)
        if store is None or answered:
            continue
        try:
            if store.check([attempt_key(_CALL)]):
                store.set(attempt_key(f"{_HERE}/{os.environ['RANK']}"), "here")
                answered = True
        except RuntimeError:
            store = None  # the launcher is gone


def silent_ranks() -> list[int] | None:
    """Call the roll: return the ranks that do not answer, or None where there is no store."""
    store = launcher_store()
    if store is None:
        return None
    others = [rank for rank in range(int(os.environ["WORLD_SIZE"])) if rank != int(os.environ["RANK"])]
    try:
        store.set(attempt_key(_CALL), os.environ["RANK"])
        time.sleep(interval() + 1.0)
        return [rank for rank in others if not store.check([attempt_key(f"{_HERE}/{rank}")])]
    except RuntimeError:
        return None


def launcher_store() -> TCPStore | None:
    """Connect to the launcher's store, which exists before and after the process group."""
    try:
        return TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=5),
        )
    except (RuntimeError, KeyError, ValueError):
        return None


def interval() -> float:
    """Return the seconds within which any responsive rank answers."""
    return max(INTERVAL_SECONDS, int(os.environ["WORLD_SIZE"]) / 250)


def attempt_key(name: str) -> str:
    """A key of this attempt: torchrun may start all ranks again."""
    return f"{name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
