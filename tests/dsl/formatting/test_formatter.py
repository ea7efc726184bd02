"""The formatter has one layout, keeps the tree and every comment, and changes nothing the second time."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from legoai.dsl.formatting.formatter import FormattingError, check_format, format_text
from legoai.dsl.formatting.unparse import LIMIT, format_plan
from legoai.dsl.frontend import syntax as tree
from legoai.dsl.frontend.parsing.parse import parse
from legoai.dsl.frontend.syntax import same
from support import VALID_PLANS, WORKED_PLANS
from support.texts import strategies as some

PLANS = WORKED_PLANS + VALID_PLANS


def _hidden(string: re.Match[str]) -> str:
    """Placeholder of equal length for a string, whose text may look like a bracket."""
    return f'"{"…" * (len(string[0]) - 2)}"'


def formatted(text: str) -> str:
    result = format_text(text, "t.plan")
    assert result.text is not None, result.diagnostics
    return result.text


@given(some.plans)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_printing_and_parsing_round_trip(plan: tree.PlanFile):
    text = format_plan(plan)
    parsed = parse(text, "t.plan")
    assert parsed.diagnostics == ()
    assert same(parsed.file.statements, plan.statements)
    assert format_plan(parsed.file) == text
    for line in re.sub(r'"(?:[^"\\]|\\.)*"', _hidden, text).split("\n"):
        assert len(line) <= LIMIT or not re.search(r"\w\([^)]|\[[^\]]", line), "a bracket could have been broken"


def test_line_too_long_by_its_opening_brace_is_broken():
    start, end = "fsdp blocks on dp_shard (", " = never)"
    head = start + "x" * (LIMIT - 1 - len(start + end)) + end
    text = formatted(f"{head} {{\n  layers.* = unit\n  norm = unit\n}}\n")
    assert text.startswith(f"{start}\n  x")


@given(some.plans, st.randoms(use_true_random=False))
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_comments_and_blank_lines_anywhere_are_kept(plan: tree.PlanFile, chance: random.Random):
    """Every line of a plan may have a trailing comment, and a comment or a blank line before it."""
    lines = []
    for number, line in enumerate(format_plan(plan).split("\n")):
        if chance.random() < 0.2:
            lines.append(
                chance.choice(["", "\n", "    ", f"# own {number}", f"   # own {number}  ", f"\n# own {number}\n"])
            )
        solved = line.strip().startswith("solved")
        lines.append(line + (f" # behind {number}" if chance.random() < 0.2 and not solved else ""))
    text = "\n".join(lines)
    before = parse(text, "t.plan")
    assert before.diagnostics == ()
    after = format_plan(before.file)
    check_format(before.file, after)
    assert "\n\n\n" not in after
    assert not after.startswith("\n")
    assert after == "" or (after.endswith("\n") and not after.endswith("\n\n"))


@given(some.texts)
@settings(max_examples=40)
def test_any_text_is_formatted_or_gives_diagnostics(text: str):
    result = format_text(text, "t.plan")
    assert (result.text is None) == bool(result.diagnostics)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_worked_plans_are_formatted(path: Path):
    text = path.read_text(encoding="utf-8")
    assert formatted(text) == text


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_line_ends_and_indentation_do_not_matter(path: Path):
    text = path.read_text(encoding="utf-8")
    assert formatted(text.replace("\n", "\r\n")) == text
    assert formatted(text.replace("  ", " ")) == text
    assert formatted(text.replace("\n", "\n\n\n").replace("\n\n\n\n\n\n", "\n\n\n")).count("\n\n\n") == 0


LAYOUTS = {
    "keywords are padded in a run, which a blank line and a long statement end": (
        "plan a\nmodel m\ncluster cpu\n\nmesh(tp=8)\nfsdp on dp_shard {root=unit\n}\nclip (norm=1)\nbatch (global=1)",
        "plan    a\nmodel   m\ncluster cpu\n\nmesh (tp = 8)\nfsdp on dp_shard {\n  root = unit\n}\n"
        "clip  (norm = 1)\nbatch (global = 1)\n",
    ),
    "a comment line does not end a run": (
        "model m\n# why\ncluster cpu\n",
        "model   m\n# why\ncluster cpu\n",
    ),
    "words that read as English are not padded": (
        'extends "a.plan"\nminimize step_time\nmodel m\n',
        'extends "a.plan"\nminimize step_time\nmodel m\n',
    ),
    "names and bounds are aligned": (
        "let a=1\nlet long_name=2\nrequire mfu>=40%\nrequire peak_memory<=1GiB\n",
        "let a         = 1\nlet long_name = 2\nrequire mfu         >= 40%\nrequire peak_memory <= 1GiB\n",
    ),
    "a short block of one rule stays on its line": (
        "compile { layers.* = inductor }\n",
        "compile { layers.* = inductor }\n",
    ),
    "a block of one rule on lines of its own stays there": (
        "compile {\n\n\nlayers.* = inductor\n\n}\n",
        "compile {\n  layers.* = inductor\n}\n",
    ),
    "a block of two rules has a line for each": (
        "compile { layers.*=inductor,root=none }\n",
        "compile {\n  layers.* = inductor\n  root     = none\n}\n",
    ),
    "options that fit are gathered on one line": (
        "mesh (\n  tp = 8\n  pp = 2\n)\n",
        "mesh (tp = 8, pp = 2)\n",
    ),
    "a comment keeps options on lines of their own": (
        "mesh ( tp = 8 # one host\n dp_shard = 2)\n",
        "mesh (\n  tp       = 8  # one host\n  dp_shard = 2\n)\n",
    ),
    "comments in a run begin in one column": (
        "checkpoint { # why\n layers.* = full # a\n root = none # b\n}  # c\n# d\n",
        "checkpoint {  # why\n  layers.* = full  # a\n  root     = none  # b\n}  # c\n# d\n",
    ),
    "a line that is too long is broken at its block first": (
        f"compile (async_tp = true) {{ {'a' * 70} = inductor }}\n",
        f"compile (async_tp = true) {{\n  {'a' * 70} = inductor\n}}\n",
    ),
    "a line that is too long is broken from the left": (
        f'model llama3("{"a" * 50}", n = "{"b" * 40}")\n',
        f'model llama3(\n  "{"a" * 50}"\n  n = "{"b" * 40}"\n)\n',
    ),
    "a line that alignment would make too long stands out": (
        f"clip {{\n a = x\n {'b' * 90} = y\n {'c' * 20} = {'d' * 60}\n}}\n",
        f"clip {{\n  a{' ' * 89} = y\n  {'b' * 90} = y\n  {'c' * 20} = {'d' * 60}\n}}\n".replace("= y", "= x", 1),
    ),
    "alternatives and ranges are spaced in one way": (
        "clip { layers.{a,b ,  c}.{ 0 .. 9 } = x }\n",
        "clip { layers.{a, b, c}.{0..9} = x }\n",
    ),
    "parentheses stand where they are needed": (
        "let a = (1+(2*3))-(4-5)*-(6/(7/8))\n",
        "let a = 1 + 2 * 3 - (4 - 5) * -(6 / (7 / 8))\n",
    ),
    "holes keep domain and answer": (
        "mesh (tp=auto   in [ 1,2 ]->2, pp = auto in 1..8)\n",
        "mesh (tp = auto in [1, 2] -> 2, pp = auto in 1..8)\n",
    ),
    "numbers keep their text": (
        "let a = 3e-4\nlet b = 1_000\nlet c = 0.10\n",
        "let a = 3e-4\nlet b = 1_000\nlet c = 0.10\n",
    ),
    "a variant is a file of its own, two columns further in": (
        "variant v {\n# why\nlet a=1\nmesh (tp=8)\nfsdp on dp_shard{root=unit\n}\n}\n",
        "variant v {\n  # why\n  let a = 1\n  mesh (tp = 8)\n  fsdp on dp_shard {\n    root = unit\n  }\n}\n",
    ),
    "blank lines are kept one at a time, and none at the edges": (
        "\n\n# a\n\n\n\nplan a\n\n\nclip {\n\n  a = b\n\n\n  c = d\n\n}\n\n\n",
        "# a\n\nplan a\n\nclip {\n  a = b\n\n  c = d\n}\n",
    ),
    "a second comment behind one item gets a line of its own": (
        "mesh (tp = 8 # a\n, # b\npp = 2)\n",
        "mesh (\n  tp = 8  # a\n  # b\n  pp = 2\n)\n",
    ),
    "a statement stays as written where a suppression would cover less": (
        "mesh(tp=8,  # a\n  pp=2)\nmesh(tp=8,   pp=2  # legoai: ignore[LP801]\n)  # b\nlet a=1\n",
        "mesh (\n  tp = 8  # a\n  pp = 2\n)\nmesh(tp=8,   pp=2  # legoai: ignore[LP801]\n)  # b\nlet a = 1\n",
    ),
    "an empty file stays empty": ("\n \n\n", ""),
    "a file of comments keeps them": ("  # a\n\n\n #b  \n", "# a\n\n#b\n"),
    "empty brackets stay empty": ("mesh ( )\nclip {\n}\nlet a = [ ]\n", "mesh ()\nclip {}\nlet a = []\n"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(name: str):
    text, expected = LAYOUTS[name]
    assert formatted(text) == expected


def test_plan_with_syntax_errors_is_not_formatted():
    result = format_text("plan a\nmesh (tp = 8\n", "t.plan")
    assert result.text is None
    assert [item.code for item in result.diagnostics] == ["LP103"]


@pytest.mark.parametrize(
    ("after", "complaint"),
    [
        ("mesh (tp = 8\n", "cannot be read"),
        ("mesh (tp = 4)  # why\n", "says something else"),
        ("mesh (tp = 8)\n", "lost"),
        ("mesh  (tp = 8)  # why\n", "changes it again"),
    ],
)
def test_a_wrong_result_is_never_written(after: str, complaint: str):
    with pytest.raises(FormattingError, match=complaint):
        check_format(parse("mesh(tp=8) # why", "t.plan").file, after)
