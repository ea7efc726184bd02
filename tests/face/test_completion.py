"""`legoai completion`: scripts that complete commands, options, files, plans, devices and words of the language."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from pathlib import Path

import pytest

from legoai.dsl.rules import all_rules
from legoai.runtime.errors import RunErrorCode
from support.commands.command_line import (
    BAD,
    called,
    here,  # noqa: F401
)


def write(name: str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(BAD, encoding="utf-8")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_script_has_commands_options_and_names(shell: str, capsys: pytest.CaptureFixture[str]):
    status, out, _ = called(capsys, "completion", shell)
    assert status == 0
    for word in ("lint", "--no-factories", "h100_sxm", "colwise"):
        assert word in out
    assert called(capsys, "completion", "fish")[0] == 2


def test_bash_completion_script_works(capsys: pytest.CaptureFixture[str]):
    Path("script").write_text(called(capsys, "completion", "bash")[1], encoding="utf-8")
    asked = (
        "source ./script; COMP_WORDS=(legoai {0} {1}); COMP_CWORD=2; COMP_LINE='legoai {0} {1}';"
        " _shtab_legoai legoai {1} {0}; echo ${{COMPREPLY[@]}}"
    )
    for command, word, legal in (
        ("lint", "--no-f", ["--no-factories"]),
        ("explain", "LP40", [rule.code for rule in all_rules() if rule.code.startswith("LP40")]),
        ("explain", "RUN00", [code for code in RunErrorCode if code.startswith("RUN00")]),
    ):
        script = ["bash", "-c", asked.format(command, word)]
        done = subprocess.run(script, capture_output=True, text=True, check=False, timeout=60)
        assert sorted(done.stdout.split()) == sorted(legal), done.stderr


@pytest.mark.parametrize(
    ("words", "legal"),
    [
        (["lint", "./"], ["./bad.plan", "./folder", "./good.plan", "./script", "./warned.plan"]),
        (["lint", "--stdin-filename", "./g"], ["./good.plan"]),
        (["cost", "--profile", "./g"], ["./good.plan"]),
        (["calibrate", "--base", "./g"], ["./good.plan"]),
        (["calibrate", "--from", "./"], ["./folder"]),
        (["export", "--checkpoint", "./"], ["./folder"]),
        (["export", "-o", "./"], ["./folder"]),
        (["lower", "--dump-graphs", "./"], ["./folder"]),
        (["cost", "plan.g"], ["plan.good"]),
        (["lint", "plan.b"], ["plan.bad", "plan.below"]),
        (["explain", "--plan", "plan.g"], ["plan.good"]),
        (["import", "plan.g"], []),
        (["cost", "--profile", "h"], ["h100_sxm", "h100_sxm96", "h200"]),
        (["calibrate", "--base", "b2"], ["b200"]),
    ],
)
def test_bash_completes_files_and_folders(words: list[str], legal: list[str], capsys: pytest.CaptureFixture[str]):
    Path("folder").mkdir()
    if not words[-1].startswith("./"):
        write("plans/below.plan")
        write("plans/no name.plan")
    Path("script").write_text(called(capsys, "completion", "bash")[1], encoding="utf-8")
    line, call = f"legoai {' '.join(words)}", f"_shtab_legoai legoai {words[-1]} {words[-2]}"
    asked = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; {call}; echo ${{COMPREPLY[@]}}"
    script = ["bash", "-c", f"source ./script; {asked}"]
    done = subprocess.run(script, capture_output=True, text=True, check=False, timeout=60)
    assert sorted(done.stdout.split()) == legal, done.stderr


def typed_in_bash(line: str, until: str) -> str:
    """What an interactive bash shows once the tab key follows a line, until it shows a text or a minute is over."""
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "PS1": "ready ", "INPUTRC": os.devnull}
    command = ["bash", "--norc", "--noprofile", "-i"]
    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, start_new_session=True
    ) as shell:
        os.close(terminal)
        shown = ""
        try:
            for keys, answer in (
                (b"", "ready "),
                (b". ./script; PS1='set '\n", "\nset "),
                (line.encode() + b"\t", until),
            ):
                os.write(controller, keys)
                shown, deadline = "", time.monotonic() + 60
                while answer not in shown and time.monotonic() < deadline:
                    if select.select([controller], [], [], 0.2)[0]:
                        shown += os.read(controller, 4096).decode()
        finally:
            shell.kill()
            os.close(controller)
    return shown


@pytest.mark.parametrize(
    "words", [["lint"], ["cost", "--profile"], ["explain", "--plan"], ["import"], ["lower", "--output"]], ids=" ".join
)
def test_bash_quotes_blanks_in_the_names_of_files(words: list[str], capsys: pytest.CaptureFixture[str]):
    Path("script").write_text(called(capsys, "completion", "bash")[1], encoding="utf-8")
    Path("one folder").mkdir()
    write("one folder/a b.plan")
    for word, whole in (("one", "one\\ folder/"), ("one\\ folder/", "one\\ folder/a\\ b.plan ")):
        line = " ".join(["legoai", *words, word])
        assert whole in typed_in_bash(line, whole)
