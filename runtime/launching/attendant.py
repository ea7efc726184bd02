"""Thread of a rank that serves its launcher: it answers roll calls, and ends the rank when the launcher is gone.

When a collective times out, the rank that waited queries all ranks over the launcher's store; NCCL ends that rank
instead, and the launcher queries the others before it ends them. A rank that is busy, or that waits in a collective
too, answers from this thread; a stopped process or a lost host does not.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from legoai.runtime.attempt import attempt, attempt_key, launcher_store, published_attempt
from legoai.runtime.launching.signals import end_at_interruptions, end_with_parent, raise_at_interruptions

INTERVAL_SECONDS: Final = 2.0
"""Between two looks of the thread, in a world of up to 500 ranks; more ranks look more seldom."""

ORPHAN_SECONDS: Final = 120.0
"""Seconds that a rank has to finish its step and save when its launcher is gone."""

LOOK_THERE: Final = (
    "look at those processes and their hosts; a run that starts again goes on from the newest checkpoint"
)
"""Help where ranks did not answer."""

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


def dismiss() -> None:
    """Let SIGINT end the process, if torchrun has started it: `KeyboardInterrupt` would be printed by exit handlers."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_at_interruptions()


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
    others = [rank for rank in range(int(os.environ.get("WORLD_SIZE", "1"))) if str(rank) != os.environ.get("RANK")]
    store = launcher_store()
    return None if store is None else _silent(others, store, os.environ, attempt())


def silent_among(ranks: Sequence[int], environment: Mapping[str, str]) -> list[int] | None:
    """Call the roll for a rank with this environment: return those of the ranks that do not answer; None as above."""
    store = launcher_store(environment)
    if store is None:
        return None
    try:
        name = published_attempt(store, environment)
    except RuntimeError:
        return None
    return _silent(ranks, store, environment, name)


def _silent(ranks: Sequence[int], store: TCPStore, environment: Mapping[str, str], name: str) -> list[int] | None:
    try:
        store.set(f"{_CALL}/{name}", environment["RANK"])
        time.sleep(interval(environment) + 1.0)
        return [rank for rank in ranks if not store.check([f"{_HERE}/{rank}/{name}"])]
    except RuntimeError:
        return None


def unanswered(silent: Sequence[int]) -> str:
    """Return what a message says of ranks that did not answer."""
    ranks = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent[:16]))}"
    more = f" and {len(silent) - 16} more" if len(silent) > 16 else ""
    return f"{ranks}{more} did not answer: stopped, stuck or unreachable"


def interval(environment: Mapping[str, str] = os.environ) -> float:
    """Return the seconds within which any responsive rank answers."""
    return max(INTERVAL_SECONDS, int(environment["WORLD_SIZE"]) / 250)
