"""Start of a lowered program on this machine with torchrun, one process per device.

`launch` runs torchrun in a process of its own. That process is this module's `__main__`: torch's own
`torch.distributed.run`, which differs only in its final output, so that a user's mistake that a rank has reported is
not buried under the agent's traceback.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import legoai
from legoai.runtime.errors import AGENT, CONSEQUENCE, MARK, RunError, RunErrorCode
from legoai.runtime.launching.program import DIGEST, digest
from legoai.runtime.launching.signals import (
    end_at_interruptions,
    end_with_parent,
    held_signals,
    is_ignored_hangup,
)
from legoai.specs.cores import cores

if TYPE_CHECKING:
    from legoai.runtime.torch_internals.distributed.process_groups import Ranks

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

SHUTDOWN_SECONDS = 120
"""Seconds that the ranks have to finish their step and save after a signal; torchrun then kills them."""

FAILURE_SECONDS = 8
"""Seconds that ranks have to report their errors when another rank has failed, after which none can save."""

_ENDED = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Statuses of a rank that the agent has ended."""

_KILLED = "a host without memory ends processes so: see its kernel log; or someone did"
"""Help where a process was ended by SIGKILL."""

_ABORTED = (
    "its own output is above; a collective that times out over NCCL ends its rank so, and `torchfrtrace` finds the "
    "rank that is behind in `flight_recorder`, in the run's folder"
)
"""Help where a rank was ended by SIGABRT."""

_PROGRAM = "legoai.runtime.launching.program"
"""The module that each rank runs."""

_LAUNCHER = "LEGOAI_LAUNCHER"
"""The process that started the agent, which ends with it."""


def launch(
    program: Path,
    *,
    nproc: int,
    arguments: Sequence[str] = (),
    directory: Path | None = None,
    text: str | None = None,
) -> int:
    """Run a program under torchrun on this machine, and wait for it.

    SIGINT, SIGTERM and SIGHUP are passed on once: the ranks finish their step, save and leave. SIGHUP is ignored where
    it was, as under `nohup`. No rank outlives this call: where the agent is killed it is reported, and the ranks save
    and leave as after SIGTERM. So they do where this process is killed.

    Args:
        program: a Python file. Its own folder is not one from which it imports.
        nproc: processes, one per device.
        arguments: for the program.
        directory: from which it imports, the plan's; the program's by default.
        text: what the file must have when a rank reads it; by default what it has then.

    Returns:
        0, the status of a failed rank, or 128 + n after signal n.

    Raises:
        RunError: there is no such program, nproc is not positive, or this is not the main thread.
    """
    check_thread()
    if not program.is_file():
        raise RunError(RunErrorCode.PROGRAM_MISSING, f"there is no program {program}")
    if nproc < 1:
        raise RunError(RunErrorCode.WRONG_OPTION, f"a program needs at least one process, not {nproc}")
    command = [sys.executable, "-m", "legoai.runtime.launching.torchrun", "--standalone", f"--nproc-per-node={nproc}"]
    folders = os.pathsep.join([str((directory or program.parent).resolve()), *filter(None, sys.path)])
    with ExitStack() as left:
        with held_signals():  # also in the agent, until it can end without a traceback
            agent = subprocess.Popen(
                [*command, "--module", _PROGRAM, folders, str(program), *arguments],
                env=_environment(nproc) | ({} if text is None else {DIGEST: digest(text)}),
                start_new_session=True,  # a terminal's Ctrl-C reaches the agent through us, once
            )
            left.callback(_end, agent)
            forwarded = left.enter_context(_forward_signals(agent))
        status = agent.wait()
        if status < 0:
            if -status not in forwarded:
                print(_agent_ended(-status), file=sys.stderr, flush=True)
            _end_ranks()
    return 128 - status if status < 0 else status


def check_thread() -> None:
    """Raise an error where this thread cannot start a program, since it cannot pass on signals.

    Raises:
        RunError: it is not the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RunError(
            RunErrorCode.NOT_MAIN_THREAD,
            "a run is started in the main thread only, which alone can pass signals on to the ranks",
            help="start it from the main thread, or in a process of its own, as by `legoai run`",
        )


def threads_per_process(nproc: int) -> int:
    """Return the threads that each of nproc processes on this machine has for one operator."""
    return max(1, cores() // nproc)


def _environment(nproc: int) -> dict[str, str]:
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(threads_per_process(nproc)))
    environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    environment |= {"PYTHONSAFEPATH": "1", _LAUNCHER: str(os.getpid()), AGENT: "1"}
    package = Path(legoai.__file__).resolve().parents[1]
    if package == Path.cwd():  # found there, and a safe path excludes the working folder
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), str(package))))
    return environment


def _end(agent: subprocess.Popen[bytes]) -> None:
    if agent.poll() is None:
        agent.terminate()
        agent.wait()


def _agent_ended(number: int) -> RunError:
    return RunError(
        RunErrorCode.AGENT_ENDED,
        f"torchrun's agent was ended by {_signal_name(number)}; its ranks save and leave, within {SHUTDOWN_SECONDS} s",
        help=_KILLED if number == signal.SIGKILL else "look for what ended it",
    )


def _end_ranks() -> None:
    """Let the ranks of an agent that has ended save and leave, and end those that do not; only Linux can find them."""
    for rank in _ranks():  # those that are not under way yet would not notice
        _send(rank, signal.SIGTERM)
    if _outlive(SHUTDOWN_SECONDS):
        for rank in _ranks():
            _send(rank, signal.SIGKILL)
        _outlive(FAILURE_SECONDS)


def _outlive(seconds: float) -> bool:
    """Wait until there are no ranks, for some seconds at most; return whether there still are."""
    until = time.monotonic() + seconds
    while _ranks():
        if time.monotonic() > until:
            return True
        time.sleep(0.2)
    return False


def _ranks() -> list[int]:
    """Return the processes of ranks that an agent of this process has started."""
    found, launcher = [], f"{_LAUNCHER}={os.getpid()}".encode()
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # of others, or gone
            words, environment = ((place / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
            if launcher in environment and _PROGRAM.encode() in words:
                found.append(int(place.name))
    return found


def _send(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


@contextmanager
def _forward_signals(agent: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Pass on the first signal; yield what was passed on."""
    sent: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if sent or agent.returncode is not None:
            print(f"still saving; the ranks are ended after {SHUTDOWN_SECONDS} s", file=sys.stderr, flush=True)
        else:
            sent.append(number)
            agent.send_signal(number)

    heard = [number for number in FORWARDED if not is_ignored_hangup(number)]
    previous: dict[signal.Signals, Any] = {number: signal.signal(number, forward) for number in heard}
    try:
        yield sent
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _agent(arguments: list[str]) -> int:
    """Run torch's agent, and report in one line what torch reports by a traceback."""
    end_at_interruptions()
    import logging

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from legoai.runtime.torch_internals.distributed.process_groups import grace_after_failure, starting_under

    log = logging.getLogger("torch.distributed.elastic")  # the level of some of its modules is their own
    log.addHandler(logging.NullHandler())
    log.propagate = False
    if _LAUNCHER in os.environ:
        end_with_parent(int(os.environ[_LAUNCHER]), signal.SIGTERM)
    silent: list[int] = []
    call = partial(_call_roll, silent)
    try:
        with grace_after_failure(FAILURE_SECONDS, before=call), starting_under(held_signals):
            run.run(run.parse_args(arguments))  # type: ignore[no-untyped-call]
    except SignalException as stop:
        return 128 + stop.sigval
    except ChildFailedError as failure:
        return _report_failure(failure, silent)
    return 0


def _call_roll(silent: list[int], ranks: Ranks) -> None:
    """Note which ranks do not answer where one has aborted, as NCCL's watchdog aborts one whose collective times out.

    Others may abort while the roll is called, and are not silent.
    """
    from legoai.runtime.launching.attendant import silent_among

    silent.clear()  # those of an earlier attempt
    statuses = [process.poll() for process, _ in ranks.values()]
    if -signal.SIGABRT in statuses and None in statuses:
        running = {int(given["RANK"]): process for process, given in ranks.values() if process.poll() is None}
        environment = next(given for _, given in ranks.values())
        missing = silent_among(list(running), environment) or ()
        silent += [rank for rank in missing if running[rank].poll() is None]


def _report_failure(failure: Any, silent: Sequence[int] = ()) -> int:
    """Report a failure that no rank has reported, and return the status of the launch.

    Args:
        failure: of the agent.
        silent: ranks that did not answer when the first rank had failed.
    """
    rank, first = _first(failure.failures)
    if (left := _left_after_signal(failure.failures)) is not None:
        return left
    if _is_reported(first):
        if first.exitcode in _ENDED:  # while it was leaving
            return 1
    elif (text := _text(first)).startswith(CONSEQUENCE):
        print(text.removeprefix(f"{CONSEQUENCE}: "), file=sys.stderr, flush=True)
    else:
        print(_unreported(rank, first.exitcode, silent), file=sys.stderr, flush=True)
    return int(first.exitcode) if first.exitcode > 0 else 128 - int(first.exitcode)


def _unreported(rank: int, status: int, silent: Sequence[int]) -> RunError:
    """Return the error of a rank that has ended without a report of its own."""
    if status >= 0:
        return RunError(
            RunErrorCode.RANK_ENDED, f"rank {rank} ended with status {status}", help="its own output is above"
        )
    from legoai.runtime.launching.attendant import LOOK_THERE, unanswered

    cause = f"rank {rank} was ended by {_signal_name(-status)}"
    if status == -signal.SIGABRT and silent:
        return RunError(RunErrorCode.NO_ANSWER, f"{cause}, and {unanswered(silent)}", help=f"{LOOK_THERE}; {_ABORTED}")
    help = {
        -signal.SIGKILL: _KILLED,
        -signal.SIGABRT: _ABORTED,
    }.get(status, "its own output is above")
    return RunError(RunErrorCode.RANK_ENDED, cause, help=help)


def _left_after_signal(failures: Mapping[int, Any]) -> int | None:
    """Return the status of ranks that have all left after a signal, which reached one of them; None for others.

    The agent ends a rank that has saved and still is leaving.
    """
    statuses = {failure.exitcode for failure in failures.values()}
    left = statuses & {128 + number for number in FORWARDED}
    errors = any(_text(failure).startswith((MARK, CONSEQUENCE)) for failure in failures.values())
    return None if errors or not left or statuses - left - set(_ENDED) else int(max(left))


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _text(failure: Any) -> str:
    """Return the message of a rank's error file, as `leave_for_the_launcher` writes it, or what torch made up."""
    message = failure.message
    return str(message.get("message", "")) if isinstance(message, dict) else str(message)


def _is_reported(failure: Any) -> bool:
    """Return whether the rank has reported its error."""
    return _text(failure).startswith(MARK)


def _first(failures: Mapping[int, Any]) -> tuple[int, Any]:
    """Return the failure that came first, with its rank.

    The agent ends the other ranks as soon as one fails, and records times of failures in whole seconds. A rank with a
    reported error precedes one without, even where the agent has ended it while it was leaving. Of the others, one that
    the agent has ended comes last, after one that failed because another had ended.
    """

    def order(item: tuple[int, Any]) -> tuple[Any, ...]:
        rank, failure = item
        follows = _text(failure).startswith(CONSEQUENCE)
        return not _is_reported(failure), failure.exitcode in _ENDED, follows, failure.timestamp, rank

    return min(failures.items(), key=order)


if __name__ == "__main__":
    sys.exit(_agent(sys.argv[1:]))
