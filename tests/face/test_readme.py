"""The README's plan, program and diagnostics are those of the tool."""

import re

import pytest

import legoai
from legoai.cli import main
from support import ROOT
from support.commands.forked_commands import forked

README = (ROOT / "README.md").read_text(encoding="utf-8")
SLIPS = (
    ("plan tiny", "plan broken"),
    ("global = 32", "global = 36"),
    ("layers.*.attention.wo           = rowwise(output = shard(1))", "layers.*.attention.wo           = rowwise"),
    ("layers.{0..1}", "layer.{0..1}"),
)
"""The three slips of the broken plan, after its name."""


def block(heading: str) -> str:
    """The first code block under a heading."""
    _, _, section = README.partition(f"\n## {heading}\n")
    found = re.search(r"```\w*\n(.*?)```", section, re.DOTALL)
    assert found is not None, heading
    return found[1]


def test_plan_equals_the_worked_plan():
    assert block("A plan") == (ROOT / "plans" / "tiny.plan").read_text(encoding="utf-8")


def test_program_equals_the_lowered_plan():
    text = legoai.lower(ROOT / "plans" / "tiny.plan").text
    for function in block("The program that it becomes").split("\n\n\n"):
        assert function.strip() in text


def test_costs_equal_the_output_of_cost(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    found = forked("cost", "plans/llama3_8b_8.plan")
    assert (found.returncode, found.stdout) == (0, block("What it costs")), found.stderr


def test_diagnostics_equal_those_of_the_broken_plan(tmp_path, monkeypatch, capsys):
    plan = (ROOT / "plans" / "tiny.plan").read_text(encoding="utf-8")
    for right, wrong in SLIPS:
        assert plan.count(right) == 1, right
        plan = plan.replace(right, wrong)
    (tmp_path / "broken.plan").write_text(plan, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["lint", "broken.plan"]) == 1
    assert block("A broken one").strip() == capsys.readouterr().out.strip()


@pytest.mark.parametrize("target", re.findall(r"\]\((?!https?:)([^)#]+)\)", README))
def test_every_link_target_exists(target):
    assert (ROOT / target).exists()
