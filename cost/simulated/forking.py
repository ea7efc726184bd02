"""Forked processes that simulate: whether they can be started, how many, and how they begin."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys

from legoai.runtime.signals import release_signals


def may_fork() -> bool:
    """Whether processes can be forked: autograd's threads, which a simulation starts, would be missing in them."""
    device = sys.modules.get("legoai.cost.simulated.device")
    used = device is not None and device.backend.used
    return not used and hasattr(os, "fork") and multiprocessing.parent_process() is None


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def begin_forked(interrupt: signal.Handlers) -> None:
    """Begin a forked process.

    Args:
        interrupt: what an interrupt does, of which the parent tells: end the process, or nothing.
    """
    signal.signal(signal.SIGINT, interrupt)
    release_signals()
    torch = sys.modules.get("torch")
    if torch is not None:
        # Threads that torch computes with in the caller's process are missing here, and would be waited for without
        # end. Where the caller has not imported it, what is composed of kept pieces does not need it either.
        torch.set_num_threads(1)
    # What the caller left in cycles may belong to such threads, and crashes when it is collected here.
    gc.freeze()
