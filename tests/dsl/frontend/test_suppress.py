"""A diagnostic that a comment accepts is suppressed there and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.formatting.formatter import format_text
from legoai.dsl.frontend import suppress
from legoai.dsl.frontend.parse import parse
from legoai.dsl.frontend.suppress import suppressions
from legoai.dsl.lint import lint
from legoai.dsl.rules.hygiene import UnusedSuppression

HEAD = 'plan a\nmodel llama3("tiny")\ncluster cpu(devices = 1)\nbatch (global = 4, micro = 1, seq_len = 64)\n'


def codes(text: str) -> list[str]:
    found = lint(HEAD + text, "t.plan", directory=Path())
    return [item.code for item in found.diagnostics if item.code.startswith(("LP2", "LP9"))]


def lines(text: str) -> list[tuple[str, int]]:
    return [(item.code, item.lines[0]) for item in suppressions(parse(text, "t.plan").file)]


SHADOWED = "checkpoint {\n  layers.* = full\n  layers.{0..99} = none\n}\n"


def test_a_comment_behind_a_line_speaks_of_that_line():
    assert codes("let a = 1\n") == ["LP901"]
    assert codes("let a = 1  # legoai: ignore[LP901]\n") == []
    assert codes("let a = 1  # legoai: ignore[LP901]\nlet b = 1\n") == ["LP901"]


def test_a_comment_alone_speaks_of_the_next_line_with_code():
    assert codes("# legoai: ignore[LP901]\n\n# why\nlet a = 1\n") == []
    assert codes("# legoai: ignore[LP901]\nclip (norm = 1)\nlet a = 1\n") == ["LP903", "LP901"]


def test_one_comment_may_name_several_codes_with_reasons_behind():
    assert lines("let a = 1  # legoai: ignore[LP901, lp902 LP903] because\n") == [
        ("LP901", 1), ("LP902", 1), ("LP903", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("comment", ["# legoai:ignore[LP901]", "#legoai: ignore[LP901]", "# legoai: ignore[ LP901 ]"])
def test_blanks_do_not_matter(comment: str):
    assert codes(f"let a = 1 {comment}\n") == []


def test_a_comment_that_suppresses_nothing_is_a_finding():
    assert codes("clip (norm = 1)  # legoai: ignore[LP901]\n") == ["LP903"]
    [found] = [
        item
        for item in lint(HEAD + "clip (norm = 1)  # legoai: ignore[LP999]\n", "t.plan", directory=Path()).diagnostics
        if item.code == "LP903"
    ]
    assert found.message == "there is no rule `LP999`"


def test_what_leaves_no_plan_cannot_be_accepted():
    assert codes("clip (norm = x)  # legoai: ignore[LP209]\n") == ["LP209", "LP903"]


def test_a_comment_speaks_of_all_lines_of_what_ends_or_begins_there():
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
    rules = "checkpoint {\n  layers.* = full\n  layers.{0..99} = none\n}"
    assert codes(f"{rules}  # legoai: ignore[LP902]\n") == ["LP902", "LP903"], "a block is not one thing"


def test_a_suppression_in_a_string_is_none():
    assert lines('let a = "# legoai: ignore[LP901]"\n') == []


def test_lines_count_as_the_parser_counts_them():
    assert lines('let a = "\u2028\x0c"\n# legoai: ignore[LP901]\n\u3000\nlet b = 1\n') == [("LP901", 4)]


def test_a_shadowed_rule_can_be_accepted_where_it_stands():
    shadowed = SHADOWED.replace("full\n", "full  # legoai: ignore[LP902]\n")
    assert codes(SHADOWED) == ["LP902"]
    assert codes(shadowed) == []


def test_what_only_a_simulation_finds_may_be_accepted_before_one():
    text = "require step_time <= 1s  # legoai: ignore[LP711]\n"
    assert codes(text) == []
    found = lint(HEAD + text, "t.plan", directory=Path())
    unused = suppress.split([], found.files.values())[2]
    assert [item.code for item in UnusedSuppression.find(unused, simulated=True)] == ["LP903"]
