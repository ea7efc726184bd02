"""Parallel jobs in forked child processes, none of which outlives the caller.

Forking is ten times faster than importing torch, which the caller has done. The caller must not have computed with
torch, since its threads would be missing in the fork.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

from legoai.runtime.errors import unwrapped
from legoai.runtime.launching.signals import end_with_parent, held_signals, release_signals


class Job(Protocol):
    """Function of a child process: it may report its progress, and wait for a message."""

    def __call__(self, tell: Callable[[str], None], hear: Callable[[], Any]) -> Any:
        """Run the job; the result must consist of plain data."""


class JobError(Exception):
    """A job failed.

    Attributes:
        name: of the job.
        message: the exception in one line, or how its process ended.
        detail: its traceback and the end of its output.
    """

    def __init__(self, name: str, message: str, detail: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name
        self.message = message
        self.detail = detail


@dataclass(slots=True)
class _Running:
    name: str
    process: Any
    pipe: Connection
    log: Path
    told: str = "starting"


class Processes:
    """Jobs that run in parallel. Leaving the context ends those that still run.

    Args:
        jobs: by name.
        folder: for their output.
        silence: seconds without a report of any job after which the jobs are considered stuck.
        watch: called with the last report of each job, by name.
    """

    def __init__(
        self, jobs: dict[str, Job], folder: Path, *, silence: float, watch: Callable[[dict[str, str]], None]
    ) -> None:
        self._jobs = jobs
        self._folder = folder
        self._silence = silence
        self._watch = watch
        self._running: dict[str, _Running] = {}

    def __enter__(self) -> Processes:
        try:
            with held_signals():
                self._start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _start(self) -> None:
        context = _context()
        for number, (name, job) in enumerate(self._jobs.items()):
            ours, theirs = context.Pipe()
            log = self._folder / f"output-{number}.txt"
            process = context.Process(target=_serve, args=(job, theirs, log, os.getpid()), name=name, daemon=True)
            process.start()
            theirs.close()
            self._running[name] = _Running(name, process, ours, log)

    def end(self) -> None:
        """End every process that is still running."""
        for item in self._running.values():
            if item.process.is_alive():
                item.process.kill()
        for item in self._running.values():
            item.process.join()
            item.pipe.close()
        self._running = {}

    def say(self, names: Sequence[str], value: Any) -> None:
        """Send a message to jobs that wait for it."""
        for name in names:
            with contextlib.suppress(OSError):  # the job has failed, which its result reports
                self._running[name].pipe.send(value)

    def results(self, names: Sequence[str]) -> list[Any]:
        """Wait for jobs, and return their results.

        Raises:
            JobError: any job, including others, has failed, or there was no report for too long.
        """
        waiting = set(names)
        found: dict[str, Any] = {}
        heard = time.monotonic()
        while waiting:
            pipes = {item.pipe: item for item in self._running.values() if not item.pipe.closed}
            ready = wait(list(pipes), timeout=1.0)
            if not ready and time.monotonic() - heard > self._silence:
                raise self._stuck(waiting)
            for pipe in ready:
                heard = time.monotonic()
                item = pipes[pipe]  # type: ignore[index]
                kind, value = self._read(item)
                if kind == "result":
                    found[item.name] = value
                    waiting.discard(item.name)
                else:
                    item.told = value
                    self._watch({other.name: other.told for other in self._running.values()})
        return [found[name] for name in names]

    def _read(self, item: _Running) -> tuple[str, Any]:
        try:
            kind, value = item.pipe.recv()
        except (EOFError, OSError):
            item.process.join(timeout=5)
            code = item.process.exitcode
            how = f"signal {-code}" if code is not None and code < 0 else f"status {code}"
            raise JobError(item.name, f"its process ended with {how}", _end_of(item.log)) from None
        if kind == "error":
            message, trace = value
            raise JobError(item.name, message, f"{trace}{_end_of(item.log)}")
        return kind, value

    def _stuck(self, waiting: set[str]) -> JobError:
        name = min(waiting)
        told = "; ".join(f"{item.name}: {item.told}" for item in self._running.values())
        return JobError(name, f"nothing was heard for {self._silence:g} s", told)


def _context() -> Any:
    return multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")


def _serve(job: Job, pipe: Connection, log: Path, parent: int) -> NoReturn:
    """Run a job in its process, and exit without the exit handlers of the forked process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it, and ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    release_signals()
    end_with_parent(parent, signal.SIGKILL)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        pipe.send(("result", job(lambda text: pipe.send(("told", text)), pipe.recv)))
        pipe.recv()  # other ranks may still be in a collective; the parent ends this process when all are done
    except (BrokenPipeError, EOFError):
        os._exit(0)
    except BaseException as error:
        with contextlib.suppress(OSError):
            error = unwrapped(error)
            text = " ".join(str(error).split())[:400]
            pipe.send(("error", (f"{type(error).__name__}: {text}", "".join(traceback.format_exception(error)))))
        os._exit(1)
    os._exit(0)


def _end_of(log: Path) -> str:
    try:
        return log.read_text(encoding="utf-8", errors="replace")[-4000:]
    except OSError:
        return ""


@contextlib.contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack, as SIGINT does, so that processes are ended on the way."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
