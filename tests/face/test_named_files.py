"""Files that a plan names, which may be a stranger's: none is read without end, and each mistake has its code."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from legoai.specs.files import MOST_DATA, MOST_TEXT
from support.commands.command_line import (
    GOOD,
    called,
    here,  # noqa: F401
)

DEEP = "[" * 100_000
CONFIG = GOOD.replace('llama3("tiny")', 'huggingface("named")')
PLANS = {
    "config": (CONFIG, "LP213"),
    "config with a layout": (CONFIG.replace("{ layers.* = unit }", "").replace("fsdp", "fsdp blocks"), "LP213"),
    "device": (GOOD.replace("cpu(devices = 4)", 'profile("named")'), "LP222"),
    "base": ('plan small\nextends "named"\n', "LP214"),
    "order": (GOOD.replace("mesh    (dp", "mesh (pp = 2, dp") + 'pipeline on pp (schedule = csv("named"))\n', "LP512"),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("kind", ["device", "large"])
def test_file_that_is_no_regular_one_or_too_large_is_refused(name: str, kind: str, capsys: pytest.CaptureFixture[str]):
    text, code = PLANS[name]
    Path("a.plan").write_text(text, encoding="utf-8")
    if kind == "device":
        Path("named").symlink_to("/dev/null")  # one that ends, should this test fail
    else:
        with Path("named").open("wb") as file:
            file.truncate((MOST_TEXT if code in ("LP214", "LP222") else MOST_DATA) + 1)
    status, out, _ = called(capsys, "lint", "--no-factories", "a.plan", "--format", "concise")
    assert status == 1
    said = next(line for line in out.splitlines() if code in line)
    if name != "config with a layout":
        assert ("it is no regular file" if kind == "device" else "it has more than") in said


@pytest.mark.parametrize(("name", "before"), [("config", '{"model_type": "llama", "x": '), ("device", "x = ")])
def test_deeply_nested_file_is_reported(name: str, before: str, capsys: pytest.CaptureFixture[str]):
    text, code = PLANS[name]
    Path("a.plan").write_text(text, encoding="utf-8")
    Path("named").write_text(before + DEEP, encoding="utf-8")
    status, out, _ = called(capsys, "lint", "--no-factories", "a.plan", "--format", "concise")
    assert status == 1 and code in out and "maximum recursion depth" in out


def test_project_file_that_cannot_be_read_is_wrong_usage(capsys: pytest.CaptureFixture[str]):
    project = Path("pyproject.toml")
    project.write_text(f"[tool.legoai]\nx = {DEEP}", encoding="utf-8")
    status, out, err = called(capsys, "lint", "good.plan")
    assert (status, out) == (2, "") and "pyproject.toml cannot be read: maximum recursion depth" in err
    project.unlink()
    project.symlink_to("/dev/null")
    status, out, err = called(capsys, "lint", "good.plan")
    assert (status, out) == (2, "") and "pyproject.toml cannot be read: it is no regular file" in err


def test_profile_beyond_the_limits_is_refused(capsys: pytest.CaptureFixture[str]):
    contents = {"it has more than 64 MiB": "{" + " " * MOST_DATA, "is no profile: maximum recursion": '{"a": ' + DEEP}
    for said, content in contents.items():
        Path("p.json.gz").write_bytes(gzip.compress(content.encode(), 1))
        status, _, err = called(capsys, "cost", "good.plan", "--profile", "./p.json.gz")
        assert status == 2 and said in err and "internal error" not in err
