"""Answers and the solver's line are written into the text, and nothing else changes."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from legoai.dsl.formatting.edit import EditError, holes, pin, write_answers, write_solved
from legoai.dsl.formatting.unparse import format_plan
from legoai.dsl.frontend import syntax as tree
from legoai.dsl.frontend.parsing.parse import parse
from legoai.dsl.frontend.solved import read
from legoai.dsl.frontend.syntax import PlanFile, same
from legoai.specs.plan import Solved
from legoai.specs.record import replace
from support.texts import strategies as some

RECORD = Solved(digest="sha256:" + "0a" * 32, version="0.1.0", profile="h100_sxm@3fe2", gap=0.008)
LINE = f'solved "{RECORD.digest}" by legoai 0.1.0, device profile h100_sxm@3fe2, gap 0.8%'

PLAN = """\
plan  a    # odd   spacing stays
mesh (tp = auto in [1, 2, 4], pp=auto in 1..8 -> 4,   # why
      dp_shard = auto)
checkpoint { layers.* = budget( auto -> 0.5 ) }
"""


def read_plan(text: str) -> PlanFile:
    parsed = parse(text, "t.plan")
    assert parsed.diagnostics == ()
    return parsed.file


def answered(text: str, *answers: str) -> str:
    file = read_plan(text)
    return write_answers(file, dict(zip((hole.span for hole in holes(file)), answers, strict=True)))


def test_answers_are_written_after_the_domain_and_replace_old_ones():
    assert answered(PLAN, "2", "8", "16", "0.25") == PLAN.replace("[1, 2, 4]", "[1, 2, 4] -> 2").replace(
        "-> 4", "-> 8"
    ).replace("dp_shard = auto", "dp_shard = auto -> 16").replace("auto -> 0.5", "auto -> 0.25")


def test_only_named_holes_change():
    file = read_plan(PLAN)
    second = list(holes(file))[1]
    assert write_answers(file, {second.span: "2"}) == PLAN.replace("-> 4", "-> 2")
    assert write_answers(file, {}) == PLAN


def test_pinning_leaves_plain_values():
    text = answered(PLAN, "2", "8", "16", "0.25")
    assert pin(read_plan(text)) == PLAN.replace("auto in [1, 2, 4]", "2").replace("auto in 1..8 -> 4", "8").replace(
        "dp_shard = auto", "dp_shard = 16"
    ).replace("auto -> 0.5", "0.25")


def test_sum_after_a_keyword_cannot_be_pinned():
    with pytest.raises(EditError, match="cannot stand here"):
        pin(read_plan("attention auto -> 1 + 2\n"))


def test_pinning_leaves_open_holes_open():
    assert pin(read_plan("mesh (tp = auto, pp = auto -> 2)\n")) == "mesh (tp = auto, pp = 2)\n"


def test_answers_in_parentheses_are_replaced_whole():
    assert answered("let a = auto -> (1 + 2)\n", "4") == "let a = auto -> 4\n"
    assert pin(read_plan("let a = auto -> (1 + 2)\n")) == "let a = (1 + 2)\n"


@pytest.mark.parametrize("answer", ["", "8,", "8)", "8\nplan b", "8 # why", "auto", "x = 2", '"'])
def test_invalid_answer_is_refused(answer: str):
    with pytest.raises(EditError, match="is not a value"):
        answered("mesh (tp = auto)\n", answer)


def test_span_without_a_hole_is_refused():
    file = read_plan(PLAN)
    with pytest.raises(EditError, match="no hole here"):
        write_answers(file, {file.statements[0].span: "8"})
    with pytest.raises(EditError, match="no answer to pin"):
        pin(file, [next(holes(file)).span])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", LINE + "\n"),
        ("plan a\n", f"plan a\n\n{LINE}\n"),
        ("plan a", f"plan a\n\n{LINE}\n"),
        ("minimize step_time", f"minimize step_time\n{LINE}\n"),
        ("require mfu >= 40%  # goal\n\nplan a\n", f"require mfu >= 40%  # goal\n{LINE}\n\nplan a\n"),
        ('solved "x" by hand  # old\nplan a\n', f"{LINE}  # old\nplan a\n"),
        ("variant v {\n  minimize mfu\n}\n", f"variant v {{\n  minimize mfu\n}}\n\n{LINE}\n"),
    ],
)
def test_solved_line_is_written_at_a_fixed_position(before: str, after: str):
    written = write_solved(read_plan(before), RECORD)
    assert written == after
    assert write_solved(read_plan(written), RECORD) == written
    [line] = [item for item in read_plan(written).statements if isinstance(item, tree.SolvedLine)]
    assert read(line) == Solved(
        digest=RECORD.digest, version="0.1.0", profile="h100_sxm@3fe2", gap=0.008, origin=read(line).origin
    )


@pytest.mark.parametrize(
    "before", ["plan a\n", "plan a\nrequire mfu >= 40%\n", "minimize mfu\n\nplan a", "plan a\nseed 1"]
)
def test_solved_line_has_the_line_ends_of_the_file(before: str):
    text = before.replace("\n", "\r\n") if "\n" in before else before
    written = write_solved(read_plan(text), RECORD)
    assert written == write_solved(read_plan(before), RECORD).replace("\n", "\r\n")


@pytest.mark.parametrize(
    ("stopped", "end"),
    [
        ("time_limit", "gap 0.8%, stopped at the time limit"),
        ("interrupted", "gap 0.8%, interrupted"),
        (None, "gap 0.8%"),
    ],
)
def test_what_stopped_the_search_is_at_the_end_of_the_solved_line(stopped, end: str):
    """A line without it, as earlier versions wrote it, is of a search that ended by itself, or not known."""
    written = write_solved(read_plan("plan a\n"), replace(RECORD, stopped=stopped))
    assert written.endswith(f"{end}\n")
    assert write_solved(read_plan(written), replace(RECORD, stopped=stopped)) == written
    [line] = [item for item in read_plan(written).statements if isinstance(item, tree.SolvedLine)]
    assert read(line).stopped == stopped


@pytest.mark.parametrize("end", [", stopped", ", interrupted, interrupted", ", by hand", " interrupted"])
def test_other_ends_of_the_solved_line_are_errors(end: str):
    [line] = [item for item in read_plan(f"{LINE}{end}\n").statements if isinstance(item, tree.SolvedLine)]
    assert read(line).code == "LP107"


def test_unknown_gap_is_written_as_unknown():
    record = Solved(digest=RECORD.digest, version=RECORD.version, profile=RECORD.profile, gap=None)
    written = write_solved(read_plan("plan a\n"), record)
    assert written.endswith("gap unknown\n")
    [line] = [item for item in read_plan(written).statements if isinstance(item, tree.SolvedLine)]
    assert read(line).gap is None


@given(some.plans, st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
def test_answers_change_nothing_but_the_holes(plan: tree.PlanFile, data: st.DataObject):
    file = read_plan(format_plan(plan))
    found = list(holes(file))
    chosen = [hole for hole in found if data.draw(st.booleans())]
    written = read_plan(write_answers(file, {hole.span: "21" for hole in chosen}))
    new = list(holes(written))
    assert len(new) == len(found)
    answer = read_plan("let x = 21").statements[0]
    assert isinstance(answer, tree.Let)
    for old, hole in zip(found, new, strict=True):
        assert same(hole.domain, old.domain)
        assert same(hole.answer, answer.value if old in chosen else old.answer)
    cut = pin(written, [hole.span for hole, old in zip(new, found, strict=True) if old in chosen])
    assert len([hole for hole in holes(read_plan(cut)) if hole.answer is None]) == len(
        [hole for hole in found if hole.answer is None and hole not in chosen]
    )
