"""The files that commands write: what stands at their names, and names that are no files."""

import os
import re
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from legoai.commands import COMMANDS
from support.command_line import (
    called,
    here,  # noqa: F401
    started,
)
from support.marks import some_slow


def read_behind(path: Path) -> tuple[threading.Thread, list[str]]:
    """Start to read a pipe until its writers have closed it."""
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(path.read_text(encoding="utf-8")), daemon=True)
    reader.start()
    return reader, found


def test_output_into_a_named_pipe_goes_to_its_reader(capsys: pytest.CaptureFixture[str]):
    os.mkfifo("pipe")
    reader, found = read_behind(Path("pipe"))
    assert called(capsys, "lower", "good.plan", "-o", "pipe")[0] == 0
    reader.join(timeout=10)
    assert found[0] == called(capsys, "lower", "good.plan")[1]
    assert stat.S_ISFIFO(Path("pipe").stat().st_mode)


def test_what_standard_output_cannot_take_is_refused(capsys: pytest.CaptureFixture[str]):
    for command in (["export", "good.plan", "-o", "-"], ["verify", "good.plan", "--save-program", "-"]):
        status, out, err = called(capsys, *command)
        assert (status, out) == (2, "")
        assert "standard output" in err


WITH_RESULTS = {
    "explain": ("explain", "norm", "--plan"),
    "lower": ("lower",),
    "cost": ("cost", "--json"),
    "solve": ("solve", "--json"),
    "diff": ("diff", "good.plan"),
    "graph": ("graph",),
    "verify": ("verify",),
    "run": ("run",),
    "export": ("export", "-o", "published"),
    "import": ("import",),
}
"""Commands of one plan whose standard output is their result."""


def test_every_command_with_a_result_is_tried():
    others = {"lint", "check", "fmt", "calibrate", "lsp", "completion"}  # their result is diagnostics, or of no plan
    assert WITH_RESULTS.keys() == COMMANDS.keys() - others


@pytest.mark.parametrize("command", WITH_RESULTS)
def test_a_refused_plan_leaves_standard_output_empty(command: str, capsys: pytest.CaptureFixture[str]):
    Path("broken.plan").write_text("plan broken\nmodel llama3(\n", encoding="utf-8")
    for plan in ("broken.plan", "missing.plan"):
        status, out, err = called(capsys, *WITH_RESULTS[command], plan)
        assert (status, out) == (2 if command == "diff" else 1, "")
        assert "error[LP" in err
        if plan == "broken.plan" and command != "import":
            assert re.search(r"legoai: broken.plan is not \w+: \d error", err)


def test_output_to_a_full_device_fails_and_leaves_it(capsys: pytest.CaptureFixture[str]):
    try:
        os.mknod("full", 0o666 | stat.S_IFCHR, os.makedev(1, 7))
        Path("full").write_bytes(b"")
    except OSError:
        pytest.skip("this user may make or open no devices")
    status, _, err = called(capsys, "lower", "good.plan", "-o", "full")
    assert (status, err) == (2, "legoai: full cannot be written: No space left on device\n")
    assert stat.S_ISCHR(Path("full").stat().st_mode)


@pytest.mark.parametrize("name", some_slow(["/dev/stdout", "/dev/fd/1"], "/dev/fd/1"))
def test_output_to_a_descriptor_follows_what_is_written_to_it(name: str):
    program = started("lower", "good.plan").stdout
    with Path("log").open("w", encoding="utf-8") as log:
        log.write("before\n")
        log.flush()
        done = started("lower", "good.plan", "-o", name, capture_output=False, stdout=log)
    assert done.returncode == 0
    assert Path("log").read_text(encoding="utf-8") == f"before\n{program}"


def test_formatting_a_named_pipe_prints_the_result(capsys: pytest.CaptureFixture[str]):
    os.mkfifo("pipe")
    threading.Thread(target=Path("pipe").write_text, args=("plan   x\n",), daemon=True).start()
    assert called(capsys, "fmt", "pipe", "-q")[:2] == (0, "plan x\n")
    assert stat.S_ISFIFO(Path("pipe").stat().st_mode)


@pytest.mark.parametrize(
    "arguments", [["cost", "good.plan", "--trace"], ["cost", "good.plan", "--html"], ["lower", "good.plan", "-o"]]
)
def test_folder_as_output_file_is_refused_before_any_work(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    Path("folder").mkdir()
    status, out, err = called(capsys, *arguments, "folder")
    assert (status, out) == (2, "")
    assert "`folder` is a folder: name a file in it" in err


@pytest.mark.parametrize("options", [[], ["--from", "missing"]], ids=" ".join)
def test_files_of_a_calibration_are_tried_before_it_measures(options: list[str], capsys: pytest.CaptureFixture[str]):
    Path("ours.json.gz").mkdir()
    status, out, err = called(capsys, "calibrate", "-o", "ours.toml", *options)
    assert (status, out, err) == (2, "", "legoai: ours.json.gz cannot be written: Is a directory\n")


@pytest.mark.parametrize("arguments", [["lint", "--help"], ["help", "lint"], ["--version"]], ids=" ".join)
def test_help_that_cannot_be_written_is_a_failure(arguments: list[str]):
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = started(*arguments, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr


def test_help_of_no_command_is_wrong_usage(capsys: pytest.CaptureFixture[str]):
    status, out, err = called(capsys, "help", "lnt")
    assert (status, out) == (2, "")
    assert "there is no command `lnt`; did you mean `lint`?" in err
