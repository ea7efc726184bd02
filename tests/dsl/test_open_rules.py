"""Expansion of `shard auto on tp` into rules: the modules, their possible styles, and the resulting text."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.formatting import edit
from legoai.dsl.lint import Linted, lint
from legoai.dsl.open_plan import OpenPlan
from legoai.dsl.open_rules import with_open_rules

HEAD = """\
plan test
model   {}
cluster cpu(devices = 2)
batch   (global = 8, micro = 4, seq_len = 128)
mesh    (tp = 2)
precision (param = fp32, reduce = fp32)
"""
MODELS = ['llama3("tiny")', 'gpt2("small")', 'mixtral("tiny")', 'gpt3("13b")']


def opened(text: str, model: str = MODELS[0], **options: object) -> Linted:
    linted = lint(HEAD.format(model) + text, "test.plan", directory=Path(), **options)
    assert not linted.has_errors, linted.diagnostics
    return with_open_rules(linted, directory=Path(), read=options.get("read"))


def rules(text: str) -> dict[str, str]:
    lines = text[text.index("shard") :].splitlines()[1:]
    return {path.strip(): value.strip() for path, sign, value in (line.partition(" = ") for line in lines) if sign}


def test_every_layer_and_norm_gets_its_own_rule():
    found = opened("shard auto on tp  # of all modules\n")
    text = found.resolution.file.text
    assert set(rules(text).values()) == {"auto"}
    assert list(rules(text)) == [
        "tok_embeddings",
        "layers.*.attention_norm", "layers.*.attention",
        "layers.*.attention.wq", "layers.*.attention.wk", "layers.*.attention.wv", "layers.*.attention.wo",
        "layers.*.ffn_norm", "layers.*.feed_forward",
        "layers.*.feed_forward.w1", "layers.*.feed_forward.w2", "layers.*.feed_forward.w3",
        "norm", "output",
    ]  # fmt: skip
    assert text.endswith("}  # of all modules\n")
    assert not found.has_errors
    plan = OpenPlan(found, directory=Path())
    assert not plan.refused
    assert [hole.line is not None for hole in plan.holes] == [True] * 14


@pytest.mark.parametrize(
    "block",
    [
        "{ layers.*.attention.{wq, wk, wv} = colwise, layers.*.attention.wo = rowwise }",
        "{\n  layers.*.attention.{wq, wk, wv} = colwise\n  layers.*.attention.wo = rowwise  # as ever\n}",
    ],
)
def test_explicit_rules_are_unchanged(block: str):
    text = opened(f"shard auto on tp {block}\nclip (norm = 1.0)\n").resolution.file.text
    found = rules(text.removesuffix("clip (norm = 1.0)\n"))
    assert "layers.*.attention.wq" not in found
    assert found["layers.*.attention"] == "auto"
    assert "layers.*.attention.wo = rowwise" in text
    assert ("# as ever" in text) == ("# as ever" in block)
    assert text.endswith("}\nclip (norm = 1.0)\n")


def test_layers_in_a_mixture_of_experts_are_not_open():
    found = rules(opened("shard auto on tp\n", 'mixtral("tiny")').resolution.file.text)
    assert [path for path in found if path.startswith("layers.*.feed_forward")] == ["layers.*.feed_forward"]


@pytest.mark.parametrize("model", MODELS)
def test_every_offered_style_fits_its_module(model: str):
    """Lint reports no offered style as misplaced, under any other styles."""
    plan = OpenPlan(opened("shard auto on tp\n", model), directory=Path())
    nothing = [hole.choices.index("none") for hole in plan.holes]
    assert not plan.candidate(nothing).errors
    for index, hole in enumerate(plan.holes):
        for choice in range(len(hole.choices)):
            chosen = [*nothing[:index], choice, *nothing[index + 1 :]]
            codes = {item.code for item in plan.candidate(chosen).errors}
            assert not codes & {"LP407", "LP408", "LP410", "LP413"}, (hole.what, hole.choices[choice])


def test_rules_of_a_hole_have_its_chosen_style():
    plan = OpenPlan(opened("shard auto on tp\n"), directory=Path())
    for index, hole in enumerate(plan.holes):
        names = [rule.treatment.name for rule in plan.rules_of(index)]
        assert names == [choice.partition("(")[0] for choice in hole.choices]
        assert {rule.origin.span for rule in plan.rules_of(index)} == {hole.line}


def test_answered_rules_form_a_plan_that_can_be_solved_again():
    found = opened("shard auto on tp\n")
    plan = OpenPlan(found, directory=Path())
    answers = {hole.span: "none" for hole in plan.holes}
    text = edit.write_answers(found.resolution.file, answers)
    again = lint(text, "test.plan", directory=Path())
    assert not again.has_errors
    assert with_open_rules(again, directory=Path()) is again
    assert [hole.answer for hole in OpenPlan(again, directory=Path()).holes] == ["none"] * 14


@pytest.mark.parametrize(
    "statement",
    [
        "shard auto on tp  # of all modules",
        "shard auto on tp { layers.*.attention.wo = rowwise }",
        "shard auto on tp {\n  layers.*.attention.wo = rowwise\n}",
    ],
)
def test_spans_are_those_of_the_plan_as_written(statement: str):
    """Behind the rules as if they were not there, and in them the statement's; so is what a diagnostic shows."""
    text = HEAD.format(MODELS[0]) + f"{statement}\nseed 3\nrequire peak_memory <= 1GiB\nclip (norm = auto)\n"
    linted = lint(text, "test.plan", directory=Path())
    found = with_open_rules(linted, directory=Path())
    before, after = linted.resolution.file.statements, found.resolution.file.statements
    plan = OpenPlan(found, directory=Path())
    assert [plan.written(item.span) for item in after] == [item.span for item in before]
    [sharded] = [item.span for item in before if text[item.span.start :].startswith("shard")]
    styles = [hole for hole in plan.holes if hole.line is not None]
    assert len({hole.span.line for hole in styles}) == len(styles) > 10
    assert {plan.written(hole.span) for hole in styles} == {sharded}
    for item in (*found.diagnostics, *plan.refused):
        if item.code == "LP012":
            span = item.label.span
            assert text[span.start : span.end] == "auto" and span.line == text.count("\n")
            assert found.files["test.plan"].text == text
            break
    else:
        pytest.fail("no diagnostic about the last hole")


def test_auto_in_a_base_plan_or_on_another_axis_is_not_searched():
    base = HEAD.format(MODELS[0]) + "shard auto on tp\n"
    linted = lint('plan derived\nextends "base.plan"\n', "t.plan", directory=Path(), read=lambda _: base)
    same = with_open_rules(linted, directory=Path(), read=lambda _: base)
    assert same is linted
    assert ["base plan" in item.message for item in linted.diagnostics if item.code == "LP012"] == [True]
    text = HEAD.format('mixtral("tiny")').replace("tp = 2", "dp_shard = 2, ep = 2")
    text += "shard auto on ep\nfsdp blocks on dp_shard\n"
    [refused] = [item for item in lint(text, "test.plan", directory=Path()).diagnostics if item.severity == "error"]
    assert refused.code == "LP012"


@pytest.mark.parametrize("subject", ["auto -> standard", "auto in [standard]"])
def test_auto_for_rules_refuses_domain_and_answer(subject: str):
    linted = lint(HEAD.format(MODELS[0]) + f"shard {subject} on tp\n", "test.plan", directory=Path())
    assert [item.code for item in linted.diagnostics if item.severity == "error"] == ["LP218"]


def test_style_none_equals_no_rule():
    rule = "shard standard on tp (sequence) {{ {} }}\n"
    unset = lint(HEAD.format(MODELS[0]) + rule.format("output = unset"), "test.plan", directory=Path())
    none = lint(HEAD.format(MODELS[0]) + rule.format("output = none"), "test.plan", directory=Path())
    assert [item.code for item in none.diagnostics] == [item.code for item in unset.diagnostics]
    assert none.analysis is not None
    assert "output" not in none.analysis.assigned(none.analysis.plan.shard[0]).by_path
