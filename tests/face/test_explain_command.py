"""`legoai explain` prints pages, references, defaults and the treatments of a module."""

from pathlib import Path

import pytest

from support.command_line import (
    called,
    here,  # noqa: F401
)


def test_explain_prints_the_page_of_a_code_and_of_a_slug(capsys: pytest.CaptureFixture[str]):
    status, out, _ = called(capsys, "explain", "lp210")
    assert status == 0
    assert out.startswith("LP210 no-such-path (error)\n")
    assert called(capsys, "explain", "no-such-path")[1] == out


@pytest.mark.parametrize("keyword", ["fsdp", "batch", "optimizer", "let", "require"])
def test_explain_prints_the_reference_of_a_statement(keyword: str, capsys: pytest.CaptureFixture[str]):
    status, out, _ = called(capsys, "explain", keyword)
    assert status == 0
    assert out.startswith(f"`{keyword} ")
    assert max(map(len, out.splitlines())) <= 100


def test_explain_lists_defaults_of_the_language_and_of_a_plan(capsys: pytest.CaptureFixture[str]):
    _, everything, _ = called(capsys, "explain", "defaults")
    assert "backend       = eager\n" in everything
    status, own, _ = called(capsys, "explain", "defaults", "--plan", "good.plan")
    assert status == 0
    assert 0 < len(own.splitlines()) < len(everything.splitlines())


def test_explain_names_the_line_that_says_it(capsys: pytest.CaptureFixture[str]):
    status, out, _ = called(capsys, "explain", "layers.0.attention.wq", "--plan", "plan.good")
    assert status == 0
    assert "in the unit layers.0" in out
    assert "good.plan:8" in out
    assert "did you mean `attention`?" in called(capsys, "explain", "layers.0.atention", "--plan", "good.plan")[2]


def test_explain_of_a_plan_with_errors_explains_what_it_can(capsys: pytest.CaptureFixture[str]):
    status, out, err = called(capsys, "explain", "norm", "--plan", "bad.plan")
    assert status == 0
    assert out
    assert "bad.plan has errors" in err
    Path("bad.plan").write_text("plan x\n", encoding="utf-8")
    status, out, _ = called(capsys, "explain", "norm", "--plan", "bad.plan")
    assert status == 1
    assert "error[LP202]" in out
