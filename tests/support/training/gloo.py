"""Pool of processes that are the ranks of one gloo group, for tests of distributed numerics."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MAX_RANKS = 8
CALL_SECONDS = 100.0


class RankError(AssertionError):
    """Error of a rank whose exception cannot be pickled, or that has ended."""


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
        self.folder = folder
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, folder, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a module-level function on every rank; return the ranks' results.

        Raises:
            Exception: what the first failing rank raised, with its traceback in a note.
            TimeoutError: a rank did not answer, with the stacks of all in a note; the pool is closed.
            RankError: a rank has ended, with its last stack in a note if a signal ended it; the pool is closed.
        """
        for pipe in self.pipes:
            pipe.send((function, args, kwargs))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(CALL_SECONDS):
                error = TimeoutError(f"rank {rank} did not answer within {CALL_SECONDS} s")
                error.add_note(self._stacks())
                self.close()
                raise error
            try:
                answers.append(pipe.recv())
            except EOFError:
                raise self._ended(rank) from None
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

    def _ended(self, rank: int) -> RankError:
        """The error for a rank that has ended without an answer."""
        process = self.processes[rank]
        process.join(timeout=2)
        status = process.exitcode
        named = signal.Signals(-status).name if status is not None and status < 0 else f"status {status}"
        error = RankError(f"rank {rank} ended with {named}")
        error.add_note(_stack_file(self.folder, rank).read_text())
        self.close()
        return error

    def _stacks(self) -> str:
        """Where each rank is."""
        for process in self.processes:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)
        return "\n".join(f"rank {rank}:\n{_stack_file(self.folder, rank).read_text()}" for rank in range(self.world))

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


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stacks-{rank}.txt"


def _serve(rank: int, world: int, folder: Path, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from legoai.runtime.torch_internals.distributed.fake_world import forget_meshes

    forget_meshes()  # in the session that was forked this process may have been rank 0 of such a mesh
    end_with_the_session()
    gc.freeze()  # objects of the session are never garbage here, and each collection would traverse all of them
    stacks = _stack_file(folder, rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(file=stacks)
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    while (call := pipe.recv()) is not None:
        function, args, kwargs = call
        try:
            pipe.send((True, function(*args, **kwargs)))
        except BaseException as error:
            pipe.send((False, *_sendable(error)))
    dist.destroy_process_group()
    os._exit(0)  # skips the exit handlers of the session that was forked


def end_with_the_session() -> None:
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
