"""Start of a lowered program on this machine with torchrun, one process per device.

`launch` runs torchrun in a process of its own. That process is this module's `__main__`: torch's own
`torch.distributed.run`, which differs only in its last words, so that a user's mistake that a rank has told
is not buried under the agent's traceback.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from legoai.runtime.errors import RunError, RunErrorCode

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

SHUTDOWN_SECONDS = 120
"""What the ranks have to finish their step and save after a signal; torchrun then ends them."""


def launch(program: Path, *, nproc: int, arguments: Sequence[str] = ()) -> int:
    """Run a program under torchrun on this machine, and wait for it.

    SIGINT, SIGTERM and SIGHUP are passed on once: the ranks finish their step, save and leave. No process
    outlives this call.

    Args:
        program: a Python file.
        nproc: processes, one per device.
        arguments: for the program.

    Returns:
        0, the status of a failed rank, or 128 + n after signal n.

    Raises:
        RunError: there is no such program, or nproc is not positive.
    """
    if not program.is_file():
        raise RunError(RunErrorCode.PROGRAM_MISSING, f"there is no program {program}")
    if nproc < 1:
        raise RunError(RunErrorCode.WRONG_OPTION, f"a program needs at least one process, not {nproc}")
    command = [sys.executable, "-m", "legoai.runtime.torchrun", "--standalone", f"--nproc-per-node={nproc}"]
    agent = subprocess.Popen(
        [*command, str(program), *arguments],
        env=_environment(nproc),
        start_new_session=True,  # a terminal's Ctrl-C reaches the agent through us, once
    )
    try:
        with _forward_signals(agent):
            status = agent.wait()
    finally:
        if agent.poll() is None:
            agent.terminate()
            agent.wait()
    return 128 - status if status < 0 else status


def threads_per_process(nproc: int) -> int:
    """Return the threads that each of nproc processes on this machine has for one operator."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // nproc)


def _environment(nproc: int) -> dict[str, str]:
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(threads_per_process(nproc)))
    environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    return environment


@contextmanager
def _forward_signals(agent: subprocess.Popen[bytes]) -> Iterator[None]:
    sent = False

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal sent
        if sent:
            print(f"still saving; the ranks are ended after {SHUTDOWN_SECONDS} s", file=sys.stderr, flush=True)
        else:
            sent = True
            agent.send_signal(number)

    previous: dict[signal.Signals, Any] = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _agent(arguments: list[str]) -> int:
    """Run torch's agent, and say in one line what torch says in a traceback."""
    import logging

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run.run(run.parse_args(arguments))  # type: ignore[no-untyped-call]
    except SignalException as stop:
        return 128 + stop.sigval
    except ChildFailedError as failure:
        return _tell(failure)
    return 0


def _tell(failure: Any) -> int:
    rank, first = _first(failure.failures)
    if not _told(first):
        cause = f"signal {-first.exitcode}" if first.exitcode < 0 else f"status {first.exitcode}"
        print(f"rank {rank} failed first, with {cause}; its own output is above", file=sys.stderr, flush=True)
    return int(first.exitcode) if first.exitcode > 0 else 128 - int(first.exitcode)


def _told(failure: Any) -> bool:
    """Return whether the rank has said in words what was wrong."""
    from legoai.runtime.report import MARK

    return MARK in str(failure.message)


def _first(failures: Mapping[int, Any]) -> tuple[int, Any]:
    """Return the failure that came first, with its rank; one that the agent's own signal ended is not a cause.

    The agent ends the other ranks as soon as it has seen one fail, and dates failures by whole seconds. Within one, a
    rank that says what was wrong comes before one that fell over its absence.
    """
    ended = (-signal.SIGTERM, 128 + signal.SIGTERM)
    return min(
        failures.items(), key=lambda item: (item[1].exitcode in ended, not _told(item[1]), item[1].timestamp, item[0])
    )


if __name__ == "__main__":
    sys.exit(_agent(sys.argv[1:]))
