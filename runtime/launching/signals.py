"""Stop signals of a run, and of a command that forks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self

IMPATIENCE_SECONDS = 2.0
"""A second signal this long after the first ends the process at once; the launcher may repeat one sooner."""


_PARENT_DEATH_SIGNAL = 1
"""`PR_SET_PDEATHSIG` of Linux."""


class StopRequest:
    """Records SIGTERM, SIGINT or SIGHUP while it is entered, so that the loop can finish its step and save.

    SIGHUP stays ignored where it was, as under `nohup`.

    Attributes:
        signal: the received signal, or None.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._since = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in self.SIGNALS if not is_ignored_hangup(number)]
            self._previous = {number: signal.signal(number, self._hear) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and time.monotonic() - self._since > IMPATIENCE_SECONDS:
            os._exit(128 + number)
        if self.signal is None:
            self.signal = signal.Signals(number)
            self._since = time.monotonic()


def is_ignored_hangup(number: signal.Signals) -> bool:
    """Return whether a signal is SIGHUP, and this process was started such that it ignores that."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


@contextlib.contextmanager
def unhurried() -> Iterator[None]:
    """Ignore SIGTERM while a rank determines its error; the launcher kills it if that takes long."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Request a signal from Linux when the parent process ends for any reason; at once if it has ended."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Hold the signals that end a program while processes are forked, and deliver them on leaving.

    Otherwise an interruption can be lost: Python calls its own hooks after a fork, and drops exceptions that a signal
    handler raises in them. A process that is forked meanwhile holds the signals too, until :func:`release_signals`.
    """
    if not hasattr(signal, "pthread_sigmask"):  # where nothing is forked either
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def release_signals() -> None:
    """Deliver the signals that :func:`held_signals` held when this process was forked."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


def end_at_interruptions() -> None:
    """End this process at SIGINT without a traceback until :func:`raise_at_interruptions`; deliver held signals.

    While modules are imported, and while the process exits, `KeyboardInterrupt` would be printed, and some code drops
    it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    release_signals()


def raise_at_interruptions() -> None:
    """Raise `KeyboardInterrupt` at SIGINT again."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
