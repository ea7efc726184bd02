"""Wait until the worker threads of gloo's groups have released the tensors of their last collectives.

A collective completes a little before the worker thread releases its tensors, for which the thread takes Python's lock.
If the interpreter exits in between, it ends the thread when that requests the lock (up to 3.13), by unwinding through
C++ functions that may not throw: `terminate called without an active exception`, so that a complete run fails with
SIGABRT. torch joins these threads only in a group's destructor, neither in `shutdown` nor in `destroy_process_group`,
and the group lives on in meshes, FSDP's units and caches (pytorch issue 190489).
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Final

WORKER: Final = "pt_gloo_runloop"
"""The name of these threads in torch."""

_THREADS: Final = Path("/proc/self/task")

_LOOK_SECONDS: Final = 0.02
"""Seconds between two samples. A thread that waits for Python's lock wakes every 5 ms (`sys.getswitchinterval`)."""


def wait_for_gloo_workers(*, seconds: float = 10.0) -> bool:
    """Wait until these threads are idle, without holding Python's lock, so that they can take it.

    A thread is idle when it sleeps in two samples and has not woken in between: one that still has to release a tensor
    runs, is runnable, or waits for Python's lock, and wakes for it. One that waits for another rank sleeps too, and is
    not waited for. Where the system does not report the states of threads, they get the time of one sample.

    Args:
        seconds: to wait at most.

    Returns:
        Whether they were idle at the end.
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
    """Return the state of each of these threads, and its counts of context switches, as the system reports them."""
    found: dict[str, tuple[str, ...]] = {}
    for thread in _THREADS.iterdir():
        with contextlib.suppress(OSError):  # it has ended
            facts = dict(line.split(":\t", 1) for line in (thread / "status").read_text().splitlines() if ":\t" in line)
            if facts.get("Name") == WORKER:
                told = ("State", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
                found[thread.name] = tuple(facts.get(name, "") for name in told)
    return found
