"""Runs under torchrun: training, a user's mistake, a crash, and signals, with no process left running."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from legoai.runtime import RunError, RunErrorCode, launch
from legoai.runtime.errors import CONSEQUENCE, MARK
from legoai.runtime.launching import torchrun
from legoai.runtime.launching.report import leave_for_the_launcher
from legoai.runtime.launching.torchrun import _call_roll, _first, _report_failure, threads_per_process
from support.marks import slow_but, some_slow

PROGRAM = """
import os, sys, time
if os.environ.get("CRASH") == os.environ["RANK"]:
    sys.exit("this rank crashes")
import torch
from legoai.runtime import process_group
from support.training import programs
if "STARTUP" in os.environ:
    process_group.STARTUP_SECONDS = float(os.environ["STARTUP"])
if "BUILDING" in os.environ:
    from legoai.runtime.training import loop
    build = loop.open_data
    def open_data(*arguments, built, **options):
        time.sleep(0.0 if built else float(os.environ["BUILDING"]))
        return build(*arguments, built=built, **options)
    loop.open_data = open_data
if os.environ["RANK"] == "1":
    time.sleep(float(os.environ.get("LATE", "0")))
programs.trainer(dp_shard=2, dtype=torch.float32).main()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def start(program, tmp_path):
    """Start `launch` in a process of its own, with a mark in its environment that finds its children."""
    mark = f"LEGOAI_TEST_MARK={os.getpid()}-{time.monotonic_ns()}"
    key, value = mark.split("=")

    def run(nproc: int, *arguments: str, **environment: str) -> subprocess.Popen:
        code = (
            "import sys, pathlib; from legoai.runtime import launch;"
            f"sys.exit(launch(pathlib.Path({str(program)!r}), nproc={nproc}, arguments=sys.argv[1:]))"
        )
        return subprocess.Popen(
            [sys.executable, "-c", code, "--device", "cpu", "--out", str(tmp_path / "out"), *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {key: value} | environment,
        )

    run.mark = mark
    yield run
    left = [pid for pid in processes_with(mark) if pid != os.getpid()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes are left behind"


def processes_with(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def ends(process: subprocess.Popen) -> tuple[int, str]:
    _, stderr = process.communicate(timeout=90)
    return process.returncode, stderr


@pytest.mark.slow
def test_a_program_trains_and_continues(start, tmp_path):
    status, output = ends(start(2, "--steps", "2", "--log-every", "1"))
    assert status == 0, output
    assert "step 2/2  loss" in output and "\x1b" not in output and "Traceback" not in output
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert records[0]["world"] == 2 and records[-1]["event"] == "end"


@pytest.mark.slow
def test_user_error_is_printed_once_without_a_traceback(start):
    status, output = ends(start(2, "--data", "/nowhere"))
    assert status == 1
    assert output.count("error[RUN010]: --data /nowhere: no such file") == 1
    assert "Traceback" not in output and "failed" not in output
    assert len(output.splitlines()) == 2, output


@pytest.mark.slow
def test_wrong_usage_is_printed_once(start):
    status, output = ends(start(4, "--stepz", "2"))
    assert status == 2
    assert output.count("usage: ") == output.count("unrecognized arguments: --stepz 2") == 1, output
    assert "Traceback" not in output and "error[" not in output


@pytest.mark.slow
def test_short_timeout_excludes_the_start(start):
    status, output = ends(start(2, "--steps", "2", "--timeout", "3", LATE="8"))
    assert status == 0, output


@pytest.mark.slow
def test_ranks_wait_for_a_corpus_however_long_it_takes(start):
    status, output = ends(start(2, "--steps", "2", "--timeout", "3", BUILDING="12", STARTUP="6"))
    assert status == 0, output


@pytest.mark.slow
def test_rank_that_does_not_start_is_named(start):
    status, output = ends(start(2, "--steps", "2", "--timeout", "3", LATE="80", STARTUP="6"))
    assert status == 1
    assert "error[RUN061]: rank 0 waited 6 s in a collective before the first step was done, and rank 1 did" in output
    assert output.count("error[") == 1 and "Traceback" not in output


def test_crash_names_the_first_failed_rank(start):
    status, output = ends(start(2, "--steps", "1", CRASH="1"))
    assert status == 1
    assert "this rank crashes" in output and "error[RUN063]: rank 1 ended with status 1" in output


def running(process: subprocess.Popen) -> None:
    """Wait for the third step."""
    assert any(re.match(r"step +3/", line) for line in process.stderr)


def ranks_of(mark: str) -> list[int]:
    """The processes of the ranks, in the order of their ranks."""
    found = {}
    for pid in processes_with(mark):
        environment = dict(
            item.split("=", 1) for item in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in item
        )
        if "RANK" in environment:
            found[int(environment["RANK"])] = pid
    return [found[rank] for rank in sorted(found)]


def gone_within(seconds: float, mark: str) -> None:
    until = time.monotonic() + seconds
    while processes_with(mark):
        assert time.monotonic() < until, "the ranks go on"
        time.sleep(0.2)


@pytest.mark.slow
def test_stopped_rank_is_named_and_ended_within_the_timeout(start):
    process = start(2, "--steps", "100000", "--log-every", "1", "--timeout", "20")
    running(process)
    [_, stopped] = ranks_of(start.mark)
    stopped_at = time.monotonic()
    os.kill(stopped, signal.SIGSTOP)
    status, output = ends(process)
    assert status == 1
    assert "error[RUN061]: rank 0 waited 20 s in a collective, and rank 1 did not answer" in output
    assert output.count("error[") == 1 and "Traceback" not in output
    assert time.monotonic() - stopped_at < 60


@pytest.mark.slow
def test_stopped_rank_is_named_where_a_collective_aborts_the_one_that_waits(start):
    process = start(2, "--steps", "100000", "--log-every", "1")
    running(process)
    waiting, stopped = ranks_of(start.mark)
    os.kill(stopped, signal.SIGSTOP)
    os.kill(waiting, signal.SIGABRT)  # as NCCL's watchdog does
    status, output = ends(process)
    assert status == 128 + signal.SIGABRT
    assert "error[RUN061]: rank 0 was ended by signal 6 (SIGABRT), and rank 1 did not answer" in output
    assert output.count("error[") == 1 and "Traceback" not in output


@pytest.mark.slow
def test_killed_rank_is_named(start):
    process = start(2, "--steps", "100000", "--log-every", "1")
    running(process)
    os.kill(ranks_of(start.mark)[1], signal.SIGKILL)
    status, output = ends(process)
    assert status == 128 + signal.SIGKILL
    assert "error[RUN063]: rank 1 was ended by signal 9 (SIGKILL)" in output
    assert output.count("error[") == 1 and "Traceback" not in output


@pytest.mark.parametrize("killed", some_slow(("the launcher", "the agent"), "the launcher", "the agent"))
def test_ranks_save_and_exit_when_the_launcher_is_killed(start, tmp_path, killed):
    process = start(2, "--steps", "100000", "--log-every", "1")
    running(process)
    agent = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
    os.kill(process.pid if killed == "the launcher" else agent, signal.SIGKILL)
    if killed == "the agent":
        status, output = ends(process)
        assert not processes_with(start.mark), "the folder is free at once"
        assert status == 128 + signal.SIGKILL and output.count("error[") == 1
        assert "error[RUN064]: torchrun's agent was ended by signal 9 (SIGKILL); its ranks save and leave" in output
    gone_within(60, start.mark)
    [saved] = [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()]
    assert int(saved.removeprefix("step-")) >= 3
    process.communicate()


@pytest.mark.parametrize(
    "number", some_slow((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.SIGINT, signal.SIGHUP)
)
def test_signal_saves_and_exits(start, tmp_path, number):
    process = start(2, "--steps", "2000", "--log-every", "1")
    assert any(re.match(r"step +3/", line) for line in process.stderr)
    process.send_signal(number)
    status, output = ends(process)
    assert status == 128 + number, output
    [saved] = [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()]
    step = int(saved.removeprefix("step-"))
    assert step >= 3 and f"stopped by signal {int(number)} after step {step}/2000, saved in" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_signal_to_one_rank_saves_and_exits_without_an_error(start, tmp_path):
    process = start(2, "--steps", "2000", "--log-every", "1")
    running(process)
    os.kill(ranks_of(start.mark)[1], signal.SIGTERM)
    status, output = ends(process)
    assert status == 128 + signal.SIGTERM and len(list((tmp_path / "out" / "checkpoints").iterdir())) == 1
    assert "stopped by signal 15 after step " in output
    assert "error" not in output and "Traceback" not in output


def test_interruption_of_the_agent_while_it_imports_prints_nothing(start):
    process = start(2, "--steps", "1")
    until = time.monotonic() + 60
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not children.read_text():
        assert time.monotonic() < until, "there is no agent"
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert ends(process) == (130, "")


@pytest.mark.parametrize("later", slow_but((0.0, 0.5)))
def test_interruption_of_ranks_while_they_import_prints_nothing(start, later):
    process = start(2, "--steps", "1")
    until = time.monotonic() + 90
    while len(ranks_of(start.mark)) < 2:
        assert time.monotonic() < until, "there are no ranks"
        time.sleep(0.01)
    time.sleep(later)
    process.send_signal(signal.SIGINT)
    assert ends(process) == (130, "")


@pytest.mark.slow
def test_program_of_another_start_is_not_run(tmp_path, capfd):
    program = tmp_path / "program.py"
    program.write_text("print('of the other')\n")
    assert launch(program, nproc=2, text="print('own')\n") == 1
    out, err = capfd.readouterr()
    assert out == "" and err.count("error[RUN005]") == 1 and "another run has written its program to" in err
    assert launch(program, nproc=1, text=program.read_text()) == 0
    assert capfd.readouterr().out == "of the other\n"


@pytest.mark.parametrize(
    ("factory", "program", "status"),
    [
        pytest.param("exit()", "import factory", 1, marks=pytest.mark.slow),
        pytest.param("exit(0)", "import factory", 1, marks=pytest.mark.slow),
        ("exit(3)", "import factory", 3),
        ("", "import factory; factory.exit(0)", 0),
    ],
)
def test_module_that_ends_the_process_with_status_0_when_it_is_imported_fails(
    tmp_path, factory: str, program: str, status: int
):
    (tmp_path / "factory.py").write_text(f"from sys import exit\n{factory}\n")
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-P", "-m", "legoai.runtime.launching.program", str(tmp_path), "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == status, done.stderr
    error = f"error[RUN069]: rank 0 failed: the model's code called sys.exit({factory[5:-1]}) (factory.py:2)"
    assert (error in done.stderr) == (status == 1)


def test_threads_per_process_divide_the_cores():
    cores = len(os.sched_getaffinity(0))
    assert threads_per_process(1) == cores
    assert threads_per_process(10 * cores) == 1


RANK_THAT_STAYS = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def test_rank_that_does_not_leave_without_its_agent_is_ended(monkeypatch):
    monkeypatch.setattr(torchrun, "SHUTDOWN_SECONDS", 0)
    monkeypatch.setattr(torchrun, "FAILURE_SECONDS", 1)
    environment = {**os.environ, "LEGOAI_LAUNCHER": str(os.getpid())}
    command = [sys.executable, "-c", RANK_THAT_STAYS]
    with (
        subprocess.Popen([*command, "legoai.runtime.launching.program"], env=environment) as rank,
        subprocess.Popen(command, env=environment) as other,
    ):
        time.sleep(1.0)
        assert torchrun._ranks() == [rank.pid]
        torchrun._end_ranks()
        assert rank.wait(10) == -signal.SIGKILL and other.poll() is None
        other.kill()


def test_missing_program_is_an_error(tmp_path):
    with pytest.raises(RunError, match="there is no program"):
        launch(tmp_path / "nothing.py", nproc=1)


def test_rank_ended_by_the_agent_is_not_the_first_failure():
    def failures(**codes: int) -> dict[int, SimpleNamespace]:
        return {
            int(rank[1:]): SimpleNamespace(
                exitcode=code, timestamp=7, message="legoai.RunError: no" if code == 1 else ""
            )
            for rank, code in codes.items()
        }

    assert _first(failures(r0=143, r1=1))[0] == 1
    assert _first(failures(r0=-15, r1=-9, r2=3))[0] == 1
    assert _first(failures(r2=143, r3=-15))[0] == 2
    assert _first(failures(r0=-6, r1=1))[0] == 1


def failure_of(folder: Path, rank: int, status: int, code: RunErrorCode | None, mark: str = MARK) -> ProcessFailure:
    """A failure as torch's agent reads it, of a rank that has left an error, if any."""
    file = folder / f"{rank}.json"
    if code is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
            leave_for_the_launcher(RunError(code, f"of rank {rank}", help="look\nthere"), mark)
    return ProcessFailure(local_rank=rank, pid=1, exitcode=status, error_file=str(file))


@pytest.mark.parametrize(("status", "expected"), [(-15, 1), (143, 1), (2, 2)])
def test_nothing_is_added_to_a_reported_error(tmp_path: Path, capsys, status: int, expected: int):
    failures = {
        0: failure_of(tmp_path, 0, status, RunErrorCode.FAILED),
        1: failure_of(tmp_path, 1, 1, RunErrorCode.LOST_RANK, CONSEQUENCE),
        2: failure_of(tmp_path, 2, -6, None),
    }
    assert _report_failure(SimpleNamespace(failures=failures)) == expected
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_nothing_is_said_where_all_ranks_left_after_a_signal(tmp_path: Path, capsys, number: int):
    """It reached one of them; the agent ends those that are leaving."""
    failures = {rank: failure_of(tmp_path, rank, status, None) for rank, status in enumerate((-15, 128 + number))}
    assert _report_failure(SimpleNamespace(failures=failures)) == 128 + number
    assert capsys.readouterr().err == ""
    failures[2] = failure_of(tmp_path, 2, 3, None)
    _report_failure(SimpleNamespace(failures=failures))
    assert "error[RUN063]" in capsys.readouterr().err


def test_rank_that_a_signal_ended_is_named(tmp_path: Path, capsys):
    failures = {rank: failure_of(tmp_path, rank, -15, None) for rank in range(2)}
    assert _report_failure(SimpleNamespace(failures=failures)) == 143
    assert "rank 0 was ended by signal 15 (SIGTERM)" in capsys.readouterr().err


def test_ranks_that_do_not_answer_an_abort_are_named(tmp_path: Path, capsys):
    failures = {0: failure_of(tmp_path, 0, -6, None), 1: failure_of(tmp_path, 1, -9, None)}
    assert _report_failure(SimpleNamespace(failures=failures), [1, 2]) == 134
    told = capsys.readouterr().err
    assert "error[RUN061]: rank 0 was ended by signal 6 (SIGABRT), and ranks 1, 2 did not answer" in told
    assert _report_failure(SimpleNamespace(failures=failures)) == 134
    told = capsys.readouterr().err
    assert "error[RUN063]: rank 0 was ended by signal 6 (SIGABRT)\n" in told and "`torchfrtrace`" in told


@pytest.mark.parametrize(("status", "silent"), [(-6, [5]), (-9, []), (0, [])])
def test_roll_is_called_where_a_rank_has_aborted(monkeypatch: pytest.MonkeyPatch, status: int, silent: list[int]):
    """Rank 4 has ended so, rank 5 is stopped, and rank 6 aborts before it answers."""

    def silent_among(ranks: list[int], environment: dict[str, str]) -> list[int]:
        statuses[2] = -6
        return ranks

    statuses = [status, None, None]
    monkeypatch.setattr("legoai.runtime.launching.attendant.silent_among", silent_among)
    ranks = {
        place: (SimpleNamespace(poll=partial(statuses.__getitem__, place)), {"RANK": str(4 + place)})
        for place in range(3)
    }
    found = [7]
    _call_roll(found, ranks)
    assert found == silent


def test_consequence_is_printed_whole_where_no_cause_is_known(tmp_path: Path, capsys):
    failures = {
        0: failure_of(tmp_path, 0, -15, None),
        1: failure_of(tmp_path, 1, 1, RunErrorCode.LOST_RANK, CONSEQUENCE),
    }
    assert _report_failure(SimpleNamespace(failures=failures)) == 1
    assert capsys.readouterr().err == "error[RUN062]: of rank 1\n  help: look\nthere\n"
