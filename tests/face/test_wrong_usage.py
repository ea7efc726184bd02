"""Command lines that cannot be followed: their status, and the words that were most likely meant."""

from __future__ import annotations

import pytest

from support.commands.command_line import (
    called,
    here,  # noqa: F401
)


def test_misspelt_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]):
    status, out, err = called(capsys, "lnt", "good.plan")
    assert (status, out) == (2, "")
    assert "did you mean `lint`?" in err


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["lint", "--formt", "json", "good.plan"], "--formt; did you mean `--format`?"),
        (["cost", "good.plan", "--jsn=1"], "--jsn=1; did you mean `--json`?"),
        (["diff", "--jso", "good.plan", "good.plan"], "--jso; did you mean `--json`?"),
        (
            ["run", "good.plan", "--nprok", "2"],
            "--nprok 2; did you mean `--nproc`?; options of the trainer stand behind",
        ),
        (["run", "good.plan", "--steps", "2"], "--steps 2; options of the trainer stand behind ` -- `"),
        (["lint", "good.plan", "--xyz"], "unrecognized arguments: --xyz\n"),
        (["graph", "good.plan", "--what", "pipline"], "; did you mean `pipeline`?"),
        (["completion", "fsh"], "; did you mean `zsh`?"),
        (["cost", "good.plan", "--profile", "h100"], "unknown device 'h100'; devices are a100_sxm40, "),
        (["cost", "good.plan", "--profile", "h100"], ".json.gz; did you mean `h100_sxm`?"),
    ],
    ids=str,
)
def test_misspelt_options_and_values_get_a_suggestion(argv: list[str], meant: str, capsys: pytest.CaptureFixture[str]):
    status, out, err = called(capsys, *argv)
    assert (status, out) == (2, "") and meant in err


@pytest.mark.parametrize(
    "argv",
    [
        ["lint", "good.plan", "--format", "xml"],
        ["lint", "good.plan", "--set", "hosts"],
        ["lint", "good.plan", "--set", "hosts=1\nlet x = 2"],
        ["lint", "good.plan", "--unsafe-fixes"],
        ["lint", "-", "--fix"],
        ["lint", "-", "-"],
        ["lint", "good.plan", "--select", "LP77"],
        ["lint", "good.plan", "--ignore", "nonsense"],
        ["fmt", "good.plan", "bad.plan", "--expand"],
        ["fmt", "good.plan", "--expand", "--check"],
        ["explain"],
        ["explain", "LP999"],
        ["explain", "fsdpp"],
        ["explain", "layers.0"],
        ["explain", "fsdp", "--variant", "x"],
        ["explain", "layers.9", "--plan", "good.plan"],
        ["graph", "good.plan", "--profile", "h200"],
        ["import", "good.toml", "--force"],
        ["import", "good.toml", "--force", "-o", "-"],
        ["lower"],
        ["lower", "good.plan", "-o", "good.plan/x.py"],
        ["run", "good.plan", "--nproc", "0"],
        ["--verbose"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_status_2_with_empty_stdout(argv: list[str], capsys: pytest.CaptureFixture[str]):
    status, out, err = called(capsys, *argv)
    assert (status, out) == (2, "")
    assert err
    assert "Traceback" not in err
    assert "mistake in LegoAI" not in err
