"""Plans in an empty folder, and calls of the command line."""

import subprocess
import sys
from pathlib import Path

import pytest

from legoai.cli import main

GOOD = """plan small

model   llama3("tiny")
cluster cpu(devices = 4)
batch   (global = 16, micro = 4, seq_len = 64)
mesh    (dp_shard = 4)

fsdp on dp_shard { layers.* = unit }
"""

BAD = GOOD + "checkpoint { layrs.* = full }\n"

WARNED = GOOD.replace("fsdp on", "let hosts = 4\n\nfsdp on")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in an empty folder with a good plan, a bad one and one with a warning."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LEGOAI_DEBUG", raising=False)
    for name, text in (("good", GOOD), ("bad", BAD), ("warned", WARNED)):
        Path(f"{name}.plan").write_text(text, encoding="utf-8")
    return tmp_path


def called(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command line."""
    status = main(list(argv))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def started(*argv: str, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "legoai", *argv],
        check=False,
        **{"capture_output": True, "text": True, "timeout": 60, **more},
    )  # type: ignore[call-overload,no-any-return]
