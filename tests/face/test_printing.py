"""Prints of a model factory, which do not reach standard output: that has the command's result alone."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from legoai.commands.printing import printing_to_standard_error
from support.commands.command_line import started

FACTORY = """
import ctypes
import os
import subprocess

print("noise of an import")
from torch import nn


def build():
    print("noise of a call")
    os.write(1, b"noise of a descriptor\\n")
    ctypes.CDLL(None).puts(b"noise of compiled code")  # buffered by C
    subprocess.run(["echo", "noise of a process"], check=True)
    return nn.Sequential(nn.Embedding(256, 16), nn.Linear(16, 256))
"""
NOISE = ("an import", "a call", "a descriptor", "compiled code", "a process")
PLAN = """plan noisy
model   python("noisy_factory:build")
cluster cpu
batch   (global = 4, micro = 2, seq_len = 16)
"""


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("noisy_factory.py").write_text(FACTORY, encoding="utf-8")
    Path("noisy.plan").write_text(PLAN, encoding="utf-8")
    Path("other.plan").write_text(PLAN.replace("seq_len = 16", "seq_len = 32"), encoding="utf-8")
    Path("open.plan").write_text(PLAN.replace("micro = 2", "micro = auto in [1, 2]"), encoding="utf-8")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("cost", "--json", "noisy.plan"),
        pytest.param(("check", "--format", "sarif", "noisy.plan"), marks=pytest.mark.slow),
        pytest.param(("cost", "--trace", "-", "noisy.plan"), marks=pytest.mark.slow),
        pytest.param(("solve", "--json", "open.plan"), marks=pytest.mark.slow),
        pytest.param(("diff", "--json", "noisy.plan", "other.plan"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("plans")
def test_standard_output_has_the_result_alone(command: tuple[str, ...]):
    done = started(*command, timeout=200)
    assert json.loads(done.stdout), done.stderr
    # The processes in which programs are compared leave out what Python prints.
    for noise in NOISE if command[0] != "diff" else NOISE[2:]:
        assert f"noise of {noise}" in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("plans")
def test_a_prediction_before_a_run_prints_to_standard_error():
    done = started("run", "noisy.plan", "--", "--steps", "1", timeout=200)
    predicted, _, _ = done.stderr.partition("predicted: ")
    assert "noise of a call" in predicted


def test_standard_output_is_as_it_was_afterwards(capfd: pytest.CaptureFixture[str]):
    before = sys.stdout
    print("result 1")
    with pytest.raises(ValueError, match="factory"), printing_to_standard_error():
        print("noise 1")
        os.write(1, b"noise 2\n")
        raise ValueError("factory")
    assert sys.stdout is before
    print("result 2")
    assert capfd.readouterr() == ("result 1\nresult 2\n", "noise 1\nnoise 2\n")
