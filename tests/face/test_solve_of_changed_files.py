"""`legoai solve` of a plan of which somebody edits a file while it is solved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from legoai.commands import solve as solve_command
from support.commands.command_line import called, here

__all__ = ["here"]

BASE = """\
plan base

model   llama3("tiny", n_layers = 1)
cluster cpu(devices = 2)
batch   (global = 8, micro = 2, seq_len = 64)
mesh    (dp_shard = 2)

fsdp on dp_shard { layers.* = unit }
"""
CHILD = 'plan child\nextends "base.plan"\ncheckpoint { layers.* = auto in [none, full] }\n'
SOLVED = "auto in [none, full] -> none"
CLIPPED = "clip (norm = 1.0)\n"


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "solve"))
    Path("base.plan").write_text(BASE, encoding="utf-8")
    Path("child.plan").write_text(CHILD, encoding="utf-8")


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Adds to a file after the search, before anything is written."""

    def add(name: str, more: str) -> None:
        def then(*arguments: Any) -> Any:
            found = search(*arguments)
            path = Path(name)
            path.write_text(path.read_text(encoding="utf-8") + more, encoding="utf-8")
            return found

        search = solve_command._solved
        monkeypatch.setattr(solve_command, "_solved", then)

    return add


def test_edited_plan_is_left_as_it_is(meanwhile, capsys: pytest.CaptureFixture[str]):
    meanwhile("child.plan", CLIPPED)
    status, _, err = called(capsys, "solve", "child.plan", "--in-place")
    assert status == 1
    assert Path("child.plan").read_text(encoding="utf-8") == CHILD + CLIPPED
    written = Path("child.solved.plan").read_text(encoding="utf-8")
    assert SOLVED in written and 'solved "sha256:' in written
    assert err.splitlines()[-2:] == [
        "legoai: child.plan was changed while it was solved, and is left as it is",
        "wrote child.solved.plan",
    ]


def test_no_file_is_replaced_by_the_solution_of_an_edited_plan(meanwhile, capsys: pytest.CaptureFixture[str]):
    Path("child.solved.plan").write_text("precious", encoding="utf-8")
    Path("child.solved.2.plan").mkdir()
    meanwhile("child.plan", CLIPPED)
    assert called(capsys, "solve", "child.plan", "--in-place")[0] == 1
    assert Path("child.solved.plan").read_text(encoding="utf-8") == "precious"
    assert SOLVED in Path("child.solved.3.plan").read_text(encoding="utf-8")


@pytest.mark.parametrize("as_json", [False, True])
def test_solution_that_has_no_place_is_printed(
    as_json: bool, meanwhile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(solve_command.os.path, "lexists", lambda _: True)
    meanwhile("child.plan", CLIPPED)
    status, out, err = called(capsys, "solve", "child.plan", "--in-place", *(["--json"] if as_json else []))
    assert status == 1
    assert "is left as it is" in err
    if as_json:
        assert [item["value"] for item in json.loads(out)["choices"]] == ["none"]
        assert "the solved text is not written" in err
    else:
        assert SOLVED in out


def test_answers_are_not_recorded_as_those_to_the_question_of_an_edited_base(
    meanwhile, capsys: pytest.CaptureFixture[str]
):
    meanwhile("base.plan", "require recompute >= 1%\n")
    status, _, err = called(capsys, "solve", "child.plan", "--in-place")
    assert status == 1
    assert "child.plan or a file that it is made of was changed while it was solved" in err
    assert Path("child.plan").read_text(encoding="utf-8") == CHILD
    written = Path("child.solved.plan").read_text(encoding="utf-8")
    assert SOLVED in written and "sha256:" not in written


def test_another_file_has_no_record_of_an_edited_base_either(meanwhile, capsys: pytest.CaptureFixture[str]):
    meanwhile("base.plan", "require recompute >= 1%\n")
    status, _, err = called(capsys, "solve", "child.plan", "-o", "other.plan")
    assert status == 1
    assert "no line records them as solved" in err
    written = Path("other.plan").read_text(encoding="utf-8")
    assert SOLVED in written and "sha256:" not in written
