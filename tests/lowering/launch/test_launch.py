"""`--launch` for each kind: the file beside the program, and wrong usage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from legoai.cli import main
from legoai.lowering.launch import KINDS

PLAN = """plan small
model   llama3("tiny")
cluster cpu(devices = 2)
batch   (global = 32, micro = 1, seq_len = 64)
mesh    (dp_shard = 2)
fsdp blocks on dp_shard
"""


@pytest.fixture(autouse=True)
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.plan").write_text(PLAN, encoding="utf-8")
    Path("there").mkdir()


@pytest.mark.parametrize("kind", KINDS)
def test_launch_file_is_beside_the_program_and_reproducible(kind: str, capsys: pytest.CaptureFixture[str]):
    command = ["lower", "small.plan", "-o", "there/small.py", "--launch", kind]
    file = Path(f"there/small{KINDS[kind]}")
    assert main(command) == 0
    assert capsys.readouterr().err == f"wrote there/small.py\nwrote {file}\n"
    assert sorted(Path("there").iterdir()) == sorted([Path("there/small.py"), file]), "none under a temporary name"
    before = file.read_bytes()
    assert main(command) == 0
    assert file.read_bytes() == before


@pytest.mark.parametrize("kind", KINDS)
def test_launch_without_output_or_writable_file_is_wrong_usage(kind: str, capsys: pytest.CaptureFixture[str]):
    file = f"there/small{KINDS[kind]}"
    assert main(["lower", "small.plan", "--launch", kind]) == 2
    assert "name it with -o" in capsys.readouterr().err
    assert not list(Path("there").iterdir())
    Path(file).mkdir()
    assert main(["lower", "small.plan", "-o", "there/small.py", "--launch", kind]) == 2
    assert f"{file} cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/null", "pipe.py"])
def test_launch_of_a_program_in_no_file_is_wrong_usage(kind: str, name: str, capsys: pytest.CaptureFixture[str]):
    os.mkfifo("pipe.py")
    assert main(["lower", "small.plan", "-o", name, "--launch", kind]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "--launch starts a program that is in a file: name it with -o" in err


@pytest.mark.parametrize(
    ("kind", "command"),
    [("slurm", "sbatch there/small.sbatch"), ("torchx", "torchx run -s SCHEDULER there/small_torchx.py:train")],
)
def test_launch_file_says_from_which_folder_it_is_started(kind: str, command: str):
    assert main(["lower", "small.plan", "-o", "there/small.py", "--launch", kind]) == 0
    text = Path(f"there/small{KINDS[kind]}").read_text(encoding="utf-8")
    assert "from the folder where `legoai lower` ran" in text and command in text


def test_launch_refuses_name_clashes_and_unknown_kinds(capsys: pytest.CaptureFixture[str]):
    assert main(["lower", "small.plan", "-o", "small.yaml", "--launch", "k8s"]) == 2
    assert "choose another name for the program" in capsys.readouterr().err
    assert not Path("small.yaml").exists()
    assert main(["lower", "small.plan", "-o", "small.py", "--launch", "cloud"]) == 2
    assert "invalid choice: 'cloud'" in capsys.readouterr().err
