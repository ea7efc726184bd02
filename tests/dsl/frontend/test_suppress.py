"""A diagnostic that a comment accepts is suppressed there and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.fixing import fixed
from legoai.dsl.formatting.formatter import FormattingError, check_format, format_text
from legoai.dsl.frontend.files.sources import Source
from legoai.dsl.frontend.parsing import suppress
from legoai.dsl.frontend.parsing.parse import parse
from legoai.dsl.frontend.parsing.suppress import suppressions
from legoai.dsl.lint import Linted, lint
from legoai.dsl.rules.hygiene import MalformedSuppression, UnusedSuppression
from support import ROOT
from support.marks import slow_but_longest

HEAD = 'plan a\nmodel llama3("tiny")\ncluster cpu(devices = 1)\nbatch (global = 4, micro = 1, seq_len = 64)\n'


def codes(text: str) -> list[str]:
    found = lint(HEAD + text, "t.plan", directory=Path())
    return [item.code for item in found.diagnostics if item.code.startswith(("LP2", "LP9"))]


def lines(text: str) -> list[tuple[str, int]]:
    return [(item.code, item.lines[0]) for item in suppressions(parse(text, "t.plan").file)]


SHADOWED = "checkpoint {\n  layers.* = full\n  layers.{0..3} = none\n}\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("clip (norm = 1)  # legoai: ignore[LP801]\n", "clip (norm = 1)\n"),
        ("clip (norm = 1)  # legoai: ignore[LP801] because \nlet a = 1\n", "clip (norm = 1)\nlet a = 1\n"),
        ("clip (norm = 1)\t# legoai: ignore[ LP801, ]", "clip (norm = 1)"),
        ("  # legoai: ignore[LP801]\nclip (norm = 1)\n", "clip (norm = 1)\n"),
        ("clip (norm = 1)\n# legoai: ignore[LP801]", "clip (norm = 1)\n"),
        ("clip (norm = 1)  # as usual  # legoai: ignore[LP801] #12\n", "clip (norm = 1)  # as usual\n"),
        ("clip (norm = 1)  # legoai: ignore[LP801]  # as usual\n", "clip (norm = 1)  # as usual\n"),
        ("clip (norm = 1)  # legoai: ignore[LP801, LP802]\n", "clip (norm = 1)\n"),
        ("let a = 1  # legoai: ignore[LP801, LP901]\n", "let a = 1  # legoai: ignore[LP901]\n"),
        ("let a = 1  # legoai: ignore[LP901,LP801]\n", "let a = 1  # legoai: ignore[LP901]\n"),
        ("let a = 1  # legoai: ignore[LP802, LP901 LP801]\n", "let a = 1  # legoai: ignore[LP901]\n"),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_unused_suppressions_are_deleted_without_a_rest(before: str, after: str, end: str):
    def again(text: str) -> Linted:
        return lint(text, "t.plan", directory=Path())

    source = Source("t.plan", (HEAD + before).replace("\n", end), None)
    text, linted = fixed(source, again(source.text), again, lambda item: item.code[:3] == "LP9", unsafe=True)
    assert text == (HEAD + after).replace("\n", end)
    assert not {"LP903", "LP905"} & {item.code for item in linted.diagnostics}


def test_trailing_comment_suppresses_on_its_line():
    assert codes("let a = 1\n") == ["LP901"]
    assert codes("let a = 1  # legoai: ignore[LP901]\n") == []
    assert codes("let a = 1  # legoai: ignore[LP901]\nlet b = 1\n") == ["LP901"]


def test_comment_line_suppresses_on_the_next_code_line():
    assert codes("# legoai: ignore[LP901]\n\n# why\nlet a = 1\n") == []
    assert codes("# legoai: ignore[LP901]\nclip (norm = 1)\nlet a = 1\n") == ["LP903", "LP901"]


def test_comment_may_name_several_codes_and_a_reason():
    assert lines("let a = 1  # legoai: ignore[LP901, lp902 LP903] because\n") == [
        ("LP901", 1), ("LP902", 1), ("LP903", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("comment", ["# legoai:ignore[LP901]", "#legoai: ignore[LP901]", "# legoai: ignore[ LP901 ]"])
def test_spaces_in_a_suppression_are_ignored(comment: str):
    assert codes(f"let a = 1 {comment}\n") == []


@pytest.mark.parametrize(("value", "found"), [("1", ["LP903"]), ("auto in [1, 2]", []), ("auto in [1, 2] -> 1", [])])
def test_suppression_that_another_answer_may_need_is_kept(value: str, found: list[str]):
    text = HEAD.replace("micro = 1", f"micro = {value}")
    linted = lint(text + "clip (norm = 1)  # legoai: ignore[LP614]\n", "t.plan", directory=Path())
    assert [item.code for item in linted.diagnostics if item.code == "LP903"] == found


def test_unused_suppression_is_reported():
    assert codes("clip (norm = 1)  # legoai: ignore[LP901]\n") == ["LP903"]
    [found] = [
        item
        for item in lint(HEAD + "clip (norm = 1)  # legoai: ignore[LP999]\n", "t.plan", directory=Path()).diagnostics
        if item.code == "LP903"
    ]
    assert found.message == "there is no rule `LP999`"


def test_unresolvable_plan_error_cannot_be_suppressed():
    assert codes("clip (norm = x)  # legoai: ignore[LP209]\n") == ["LP209", "LP903"]


def test_comment_suppresses_in_all_lines_of_its_statement():
    """So that a diagnostic stays accepted when the formatter breaks a long line."""
    long = f"optimizer adamw(lr = 0.0, betas = [0.9, 0.95], eps = 1e-8, weight_decay = {'0' * 60}.1)"
    for text in (f"{long}  # legoai: ignore[LP681]\n", f"# legoai: ignore[LP681]\n{long}\n"):
        formatted = format_text(HEAD + text, "t.plan").text
        assert formatted is not None
        assert "\n  lr           = 0.0\n" in formatted
        for version in (HEAD + text, formatted):
            assert not {"LP681", "LP903"} & {
                item.code for item in lint(version, "t.plan", directory=Path()).diagnostics
            }
    assert codes(f"{SHADOWED.rstrip()}  # legoai: ignore[LP902]\n") == []
    assert codes(f"# legoai: ignore[LP902]\n{SHADOWED}") == []
    assert codes(SHADOWED.replace("{\n", "{  # legoai: ignore[LP902]\n", 1)) == ["LP903", "LP902"]


INVALID = Path(__file__).parents[1] / "invalid"


def trailing(path: Path) -> list[tuple[str, str]]:
    """Code and text of the plan, for each suppression after a line with a suppressible diagnostic."""
    text = path.read_text(encoding="utf-8")
    if text.startswith("# legoai lint") or parse(text, path.name).diagnostics:
        return []
    found = lint(text, path.name, directory=path.parent).diagnostics
    result = []
    for item in found:
        line = item.label.span.line
        rows = text.split("\n")
        if not suppress.suppressible(item) or item.label.span.file != path.name or "#" in rows[line - 1]:
            continue
        rows[line - 1] += f"  # legoai: ignore[{item.code}]"
        result.append((item.code, "\n".join(rows)))
    return result


WITHOUT = (*suppress.NEVER_ACCEPTED, UnusedSuppression.code, MalformedSuppression.code)
"""Codes that no comment accepts, or that are of comments themselves."""


@pytest.mark.parametrize(
    "path",
    slow_but_longest(
        path for path in sorted(INVALID.glob("LP[3-9]*/*.plan")) if not path.parent.name.startswith(WITHOUT)
    ),
    ids=lambda path: path.stem,
)
def test_formatting_keeps_suppressions_effective(path: Path):
    found = trailing(path)
    assert found
    for code, text in found:
        before = lint(text, path.name, directory=path.parent)
        formatted = format_text(text, path.name).text
        assert formatted is not None
        after = lint(formatted, path.name, directory=path.parent)
        assert [item.code for item in after.diagnostics] == [item.code for item in before.diagnostics], code
        assert "LP903" not in {item.code for item in after.diagnostics}


BROKEN = [
    "fsdp on dp_shard { layers.* = unit(reshard = never), root = unit }  # legoai: ignore[LP307]",
    "variant v { let b = 1 }  # legoai: ignore[LP307]",
    "# legoai: ignore[LP307]\nfsdp on dp_shard { layers.* = unit(reshard = never), root = unit }",
    "let a = auto in [1, 2, 3]  # legoai: ignore[LP307]",
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_statement_is_covered_as_a_whole_before_and_after_formatting(text: str):
    formatted = format_text(HEAD + text + "\n", "t.plan").text
    assert formatted is not None
    for version in (HEAD + text + "\n", formatted):
        file = parse(version, "t.plan").file
        [found] = suppressions(file)
        last = file.statements[-1].span
        assert (found.lines[0], found.lines[-1]) == (last.line, last.end_line)


OPTIMIZER = "optimizer adamw(lr = 3e-4)\n"
SEPARATED = [
    "schedule cosine(\n  steps = 1000, floor = 0.1, floor_lr = 3e-3, warmup = 10  # legoai: ignore[LP693]\n)\n",
    "schedule cosine(steps = 1000, warmup = 1%\n# legoai: ignore[LP693]\n, floor =  0.1, floor_lr = 3e-3)\n",
    "schedule wsd(steps = 1000,\n# legoai: ignore[LP692]\nwarmup = 10, decay = 0%)\n",
    "optimizer sgd(lr = 0.1, momentum = 0.9) { norm = group(eps = 1e-5 # legoai: ignore[LP687]\n) }\n",
    "variant v {\n    schedule wsd(steps = 1000,\n# legoai: ignore[LP692]\nwarmup = 10, decay = 0%)\n}\n",
    "variant v { let spare = 1 # legoai: ignore[LP901]\n   let   more =  2\n}\n",
]


@pytest.mark.parametrize("text", SEPARATED)
def test_formatting_keeps_what_a_suppression_covers_together(text: str):
    """Where the layout would separate it, the statement stays as it is written, and no other does."""
    text = HEAD + ("" if "optimizer" in text else OPTIMIZER) + text + "clip(norm=1)\n"
    formatted = format_text(text, "t.plan").text
    assert formatted is not None
    assert "clip (norm = 1)\n" in formatted
    assert "let   more" not in formatted or "variant v { let spare" in formatted
    before, after = (lint(version, "t.plan", directory=Path()).diagnostics for version in (text, formatted))
    assert [item.code for item in after] == [item.code for item in before]
    assert "LP903" not in {item.code for item in after}


def test_formatter_proves_that_suppressions_cover_the_same():
    before = parse("schedule wsd(\n  warmup = 10, decay = 0%  # legoai: ignore[LP692]\n)\n", "t.plan").file
    with pytest.raises(FormattingError, match="suppression"):
        check_format(before, "schedule wsd(\n  warmup = 10\n  decay  = 0%  # legoai: ignore[LP692]\n)\n")


ALMOST = [
    "# legoai: ignore",
    "# legoai: ignore LP804",
    "# legoai: ignore(LP804)",
    "# legoai: ignore[]",
    "# legoai: ignore[ , ]",
    "# legoai: ignore[LP804",
    "# legoai ignore[LP804]",
    "# legoai:ignored[LP804]",
    "# LegoAI: Ignore[lp804]",
    "# LEGOAI: IGNORE[LP804]",
    "# legoai: noqa",
    "# legoai: noqa[LP804]",
    "# legoai: disable=LP804",
    "# lego: ignore[LP804]",
    "# noqa: LP804",
    "# type: ignore[LP804]",
    "# ruff: noqa: LP804",
    "# ignore LP804",
    "# ignore[LP-804]",
    "# pylint: disable=LP804",
    "# legoai: LP804",
    "# legoai: ignore-file",
    "# small enough here  # legoai: ignore LP804",
]


@pytest.mark.parametrize("comment", ALMOST)
def test_malformed_suppression_is_reported(comment: str):
    assert codes(f"clip (norm = 1)  {comment}\n") == ["LP905"]
    assert codes(f"{comment}\nclip (norm = 1)\n") == ["LP905"]


@pytest.mark.parametrize(
    "comment",
    [
        "# LegoAI ignores this axis",
        "# legoai lint --set hosts=4",
        "# LP804 does not matter: there are two hosts",
        "# we do not ignore LP804 here",
        "# ignore the last batch",
        "# read docs/rules.md on LP804",
    ],
)
def test_prose_comment_is_not_a_suppression(comment: str):
    assert codes(f"clip (norm = 1)  {comment}\n") == []


def test_reason_may_precede_a_suppression():
    assert codes("let a = 1  # later  # legoai: ignore[LP901]\n") == []


def test_malformed_suppression_with_codes_has_a_fix():
    [found] = lint(HEAD + "clip (norm = 1)  # noqa: LP804, LP805\n", "t.plan", directory=Path()).diagnostics
    assert found.fix is not None
    assert [edit.replacement for edit in found.fix.edits] == ["# legoai: ignore[LP804, LP805]"]


def test_suppression_inside_a_string_is_ignored():
    assert lines('let a = "# legoai: ignore[LP901]"\n') == []


def test_suppression_lines_match_parser_lines():
    assert lines('let a = "\u2028\x0c"\n# legoai: ignore[LP901]\n\u3000\nlet b = 1\n') == [("LP901", 4)]


def test_shadowed_rule_is_suppressed_at_its_line():
    shadowed = SHADOWED.replace("full\n", "full  # legoai: ignore[LP902]\n")
    assert codes(SHADOWED) == ["LP902"]
    assert codes(shadowed) == []


def test_suppression_of_a_simulation_diagnostic_is_not_unused():
    text = "require step_time <= 1s  # legoai: ignore[LP711]\n"
    assert codes(text) == []
    found = lint(HEAD + text, "t.plan", directory=Path())
    unused = suppress.split([], found.files.values())[2]
    assert [item.code for item in UnusedSuppression.find(unused, simulated=True)] == ["LP903"]


def test_the_example_of_the_manual_suppresses():
    manual = (ROOT / "docs" / "language.md").read_text(encoding="utf-8")
    lines = [line for line in manual.split("\n") if "# legoai: ignore[" in line and not line.startswith(("`", "#"))]
    assert lines
    for line in lines:
        base = (
            'plan a\nmodel llama3("8b")\ncluster h100_sxm(hosts = 8, fabric = infiniband_ndr)\n'
            "batch (global = 64, micro = 1, seq_len = 256)\n"
        )
        code = line.split("ignore[")[1].split("]")[0]
        shown = [item.code for item in lint(base + line + "\n", "a.plan", directory=Path()).diagnostics]
        without = lint(base + line.split("#")[0] + "\n", "a.plan", directory=Path()).diagnostics
        assert code in {item.code for item in without}
        assert code not in shown
        assert "LP903" not in shown
