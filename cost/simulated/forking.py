"""Forked processes of a simulation: whether to fork, and their initialisation."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys

from legoai.runtime.launching.signals import release_signals


def may_fork() -> bool:
    """Whether processes can be forked: not once a simulation has started autograd's threads, which forks lack."""
    device = sys.modules.get("legoai.cost.simulated.device")
    used = device is not None and device.backend.used
    return not used and hasattr(os, "fork") and multiprocessing.parent_process() is None


def begin_forked(interrupt: signal.Handlers) -> None:
    """Initialise a forked process.

    Args:
        interrupt: handler of an interrupt, which the parent reports: ends the process, or does nothing.
    """
    signal.signal(signal.SIGINT, interrupt)
    release_signals()
    torch = sys.modules.get("torch")
    if torch is not None:
        # The caller's compute threads of torch do not exist in a fork, and would be waited for forever. Where the
        # caller has not imported torch, traces composed of cached pieces do not need it either.
        torch.set_num_threads(1)
    # Garbage cycles of the caller may refer to such threads, and crash when they are collected here.
    gc.freeze()
