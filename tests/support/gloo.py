"""Pool of processes that are the ranks of one gloo group, for tests of distributed numerics."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MAX_RANKS = 8
CALL_SECONDS = 100.0


class RankError(AssertionError):
    """What a rank raised, where the exception itself cannot be sent."""


class GlooPool:
    """`world` forked processes in one gloo group, which call functions together.

    A fork is ten times faster than a fresh interpreter that imports torch. The group lives as long as the
    pool, because DTensor caches meshes, and a mesh must not outlive its groups.
    """

    def __init__(self, world: int, folder: Path) -> None:
        assert 1 <= world <= MAX_RANKS
        context = multiprocessing.get_context("fork")
        self.world = world
        self.pipes: list[Connection] = []
        self.processes = []
        store = folder / "store"
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a module-level function on every rank; return the ranks' results.

        Raises:
            Exception: what the first failing rank raised, with its traceback in a note.
            TimeoutError: a rank did not answer; the pool is closed.
        """
        for pipe in self.pipes:
            pipe.send((function, args, kwargs))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(CALL_SECONDS):
                self.close()
                raise TimeoutError(f"rank {rank} did not answer within {CALL_SECONDS} s")
            answers.append(pipe.recv())
        failed = [(rank, answer) for rank, answer in enumerate(answers) if not answer[0]]
        if failed:
            rank, (_, error, trace) = failed[0]
            if len(failed) < self.world:
                self.close()  # the ranks no longer agree on the collectives that were done
            error.add_note(f"on rank {rank}:\n{trace}")
            raise error
        return [value for _, value in answers]

    @property
    def alive(self) -> bool:
        return bool(self.processes) and all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self.pipes:
            pipe.close()
        self.pipes, self.processes = [], []


def _serve(rank: int, world: int, store: Path, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    _end_with_the_session()
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    while (call := pipe.recv()) is not None:
        function, args, kwargs = call
        try:
            pipe.send((True, function(*args, **kwargs)))
        except BaseException as error:
            pipe.send((False, *_sendable(error)))
    dist.destroy_process_group()
    os._exit(0)  # skips the exit handlers of the session that was forked


def _end_with_the_session() -> None:
    """A session that is killed cannot close its pool; the kernel ends the ranks then."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _sendable(error: BaseException) -> tuple[BaseException, str]:
    import pickle

    trace = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RankError(f"{type(error).__name__}: {error}"), trace
    return error, trace
