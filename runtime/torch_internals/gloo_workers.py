"""Wait for the worker threads of gloo's groups to let go of the tensors of their last collectives.

A collective is done for whoever waits for it a little before the thread that did it lets go of its tensors, for which
that thread takes Python's lock. Where Python ends in between, it ends the thread as it asks for the lock (up to 3.13),
by unwinding through functions of C++ that may not throw: `terminate called without an active exception`, and a run that
was complete has failed with SIGABRT. torch joins these threads in a group's destructor alone, neither in `shutdown` nor
in `destroy_process_group`, and the group lives on in meshes, FSDP's units and caches (pytorch issue 190489).
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Final

WORKER: Final = "pt_gloo_runloop"
"""The name that torch gives to these threads."""

_THREADS: Final = Path("/proc/self/task")

_LOOK_SECONDS: Final = 0.02
"""Between two looks. A thread that waits for Python's lock wakes every 5 ms (`sys.getswitchinterval`) to ask for it."""


def wait_for_gloo_workers(*, seconds: float = 10.0) -> bool:
    """Wait until these threads have nothing to do, without Python's lock, so that they can take it.

    A thread has nothing to do when it sleeps in two looks and did not wake in between: one that still has to let go of
    a tensor runs, wants to run, or waits for Python's lock, and wakes for it. One that waits for another rank sleeps
    too, and is not waited for. Where the system does not tell what threads do, they have the time of one look.

    Args:
        seconds: to wait at most.

    Returns:
        Whether they had nothing to do in the end.
    """
    if not _THREADS.is_dir():
        time.sleep(_LOOK_SECONDS)
        return True
    until, before = time.monotonic() + seconds, _workers()
    while before:
        time.sleep(_LOOK_SECONDS)
        now = _workers()
        if now == before and all("S (sleeping)" in states for states in now.values()):
            return True
        if time.monotonic() > until:
            return False
        before = now
    return True


def _workers() -> dict[str, tuple[str, ...]]:
    """What each of these threads does, and how often it has slept and was interrupted, as the system counts."""
    found: dict[str, tuple[str, ...]] = {}
    for thread in _THREADS.iterdir():
        with contextlib.suppress(OSError):  # it has ended
            facts = dict(line.split(":\t", 1) for line in (thread / "status").read_text().splitlines() if ":\t" in line)
            if facts.get("Name") == WORKER:
                told = ("State", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
                found[thread.name] = tuple(facts.get(name, "") for name in told)
    return found
