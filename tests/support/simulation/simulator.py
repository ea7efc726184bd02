"""Process of the session that simulates for many tests, and keeps what it has traced.

A process for each test (`support.simulation.simulated.in_a_fork`) traces each plan anew. Tests that replace functions
or environment variables, or whose functions leave state behind, need one of their own still.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from support.training.gloo import end_with_the_session

CALL_SECONDS = 280


class Simulator:
    """Forked process that calls functions one after another."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a module-level function in the process, and return its result.

        Raises:
            Exception: what the function raised; the process then ends.
            TimeoutError: the process did not answer, and was ended.
        """
        done, value = False, TimeoutError(f"no answer within {CALL_SECONDS} s")
        try:
            self.pipe.send((function, args, kwargs))
            if self.pipe.poll(CALL_SECONDS):
                done, value = self.pipe.recv()
        finally:
            if not done:
                self.close()
        if not done:
            raise value
        return value

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


_simulators: list[Simulator] = []
"""That of the session, once a test has used it."""


def in_the_simulator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module-level function in the simulator of the session, and return its result or raise its error."""
    if not _simulators or not _simulators[0].process.is_alive():
        _simulators[:] = [Simulator()]
    return _simulators[0](function, *args, **kwargs)


def _serve(pipe: Connection) -> None:
    end_with_the_session()
    # OpenMP's threads of the parent, if a test before computed with several, are missing here: it would wait for them.
    torch.set_num_threads(1)
    gc.freeze()  # cyclic garbage of other tests may need threads that are missing here
    with contextlib.suppress(EOFError):
        while True:
            function, args, kwargs = pipe.recv()
            try:
                pipe.send((True, function(*args, **kwargs)))
            except BaseException as error:
                pipe.send((False, type(error)(str(error)) if isinstance(error, ValueError | RuntimeError) else error))
