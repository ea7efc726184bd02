"""Forked processes in which candidates are simulated.

Beside one for each processor there is one of lowest priority. It simulates what is likely to be asked for while a
processor would be idle: while the search decides what to ask for next, or waits for the last of several candidates.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Final, TypeVar

from legoai.cost.simulated.forking import begin_forked, may_fork
from legoai.runtime.launching.signals import held_signals

T = TypeVar("T")

_MOST_SECONDS: Final = 5.0
"""For which the end of a pool is waited for, whose processes have ended."""
_LOWEST_PRIORITY: Final = 19
"""Increment of `nice`."""


class WorkerKilledError(RuntimeError):
    """A process that simulated a candidate was killed."""

    def __init__(self) -> None:
        super().__init__("a process that simulated a plan was killed; is there too little memory?")


class Workers:
    """Processes that call functions; they are forked when they are needed.

    Args:
        count: of them, beside the one of lowest priority.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool: ProcessPoolExecutor | None = None
        self._idle: ProcessPoolExecutor | None = None
        self._ours: list[Any] = []
        self._threads: list[threading.Thread] = []

    @property
    def begun(self) -> bool:
        """Whether any were forked."""
        return self._pool is not None or self._idle is not None

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call a function in one of the processes.

        Raises:
            WorkerKilledError: a process was killed.
        """
        if self._pool is None:
            self._pool = _forking(self._count, begin_forked)
        try:
            return self._submitted(self._pool, function, arguments)
        except BrokenProcessPool:
            raise WorkerKilledError from None

    def submit_idle(self, function: Callable[..., T], *arguments: Any) -> Future[T] | None:
        """Call a function in the process of lowest priority; None where that was killed."""
        if self._idle is None:
            self._idle = _forking(1, _begin_idle)
        try:
            return self._submitted(self._idle, function, arguments)
        except BrokenProcessPool:
            return None

    def _submitted(self, pool: ProcessPoolExecutor, function: Callable[..., T], arguments: Sequence[Any]) -> Future[T]:
        before, threads = set(multiprocessing.active_children()), set(threading.enumerate())
        with held_signals():
            submitted = pool.submit(function, *arguments)
        self._ours += [process for process in multiprocessing.active_children() if process not in before]
        self._threads += [one for one in threading.enumerate() if one not in threads and not one.daemon]
        return submitted

    def close(self) -> None:
        """End the processes, whatever they do."""
        pools = [pool for pool in (self._pool, self._idle) if pool is not None]
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for process in self._ours:
            process.terminate()
        for process in self._ours:
            process.join()
        # Left to itself, the pool's thread may close what the interpreter writes to at its end.
        for thread in self._threads:
            thread.join(_MOST_SECONDS)
        self._pool, self._idle = None, None
        self._ours.clear()
        self._threads.clear()


def apart(function: Callable[[], T]) -> T:
    """Call a function that simulates in a forked process, where that is possible: this one stays able to fork.

    Raises:
        WorkerKilledError: the process was killed.
    """
    if not may_fork():
        return function()
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_begin_apart, initargs=(function,)) as pool:
        try:
            answer: T = pool.submit(_call_apart).result()
            return answer
        except BrokenProcessPool:
            raise WorkerKilledError from None


_apart: list[Callable[[], Any]] = []
"""What a forked process calls; it is forked with it, so that it need not be sent."""


def _begin_apart(function: Callable[[], Any]) -> None:
    begin_forked(signal.SIG_DFL)
    _apart.append(function)


def _call_apart() -> Any:
    return _apart[-1]()


def first_result(futures: Sequence[Future[T]], seconds: float | None) -> T:
    """The result of the first of some futures that ends, of equal calls; the others are cancelled.

    Raises:
        TimeoutError: none has ended in so many seconds.
        WorkerKilledError: all processes were killed.
    """
    for future in as_completed(futures, seconds):
        if not isinstance(future.exception(), BrokenProcessPool):
            for other in futures:
                other.cancel()
            return future.result()
    raise WorkerKilledError


def _forking(count: int, begin: Callable[[signal.Handlers], None]) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("fork")
    return ProcessPoolExecutor(count, mp_context=context, initializer=begin, initargs=(signal.SIG_IGN,))


def _begin_idle(interrupt: signal.Handlers) -> None:
    begin_forked(interrupt)
    os.nice(_LOWEST_PRIORITY)
