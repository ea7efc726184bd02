"""Explanation of one module: its treatments, each with its line."""

from pathlib import Path

import pytest

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.frontend.parsing.parse import parse
from legoai.dsl.frontend.syntax import Let
from legoai.dsl.frontend.values.arguments import Reader
from legoai.dsl.frontend.values.scope import Scope
from legoai.dsl.lint import lint
from legoai.dsl.reporting.explain import NoSuchModuleError, decisions_of, defaults_of, explain
from legoai.dsl.reporting.reference import defaults
from legoai.specs.directives import FAMILIES, family
from legoai.specs.directives.base import Option, describe

PLAN = """plan small

model   llama3("tiny")
cluster cpu(devices = 8)
batch   (global = 32, micro = 4, seq_len = 128)
let     wide = 2
mesh    (pp = 2, dp_shard = 2, tp = wide)

shard on tp {
  layers.*.attention              = inputs(from = shard(1), to = replicate)
  layers.*.attention.{wq, wk, wv} = colwise
  output.weight                   = shard(0)
}
fsdp on dp_shard {
  layers.* = unit(reshard = after_backward)
  layers.1 = none
}
pipeline on pp (split = [layers.2], schedule = auto in [1F1B, GPipe] -> 1F1B)
checkpoint {
  layers.*           = full
  layers.3.attention = none
}
"""


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    return analysis_of(PLAN)


def analysis_of(text: str, **settings: str) -> Analysis:
    linted = lint(text, "s.plan", directory=Path(), settings=settings)
    assert linted.analysis is not None
    assert linted.analysis.manifest is not None, linted.diagnostics
    return linted.analysis


def rows(analysis: Analysis, path: str, statement: str) -> list[tuple[str, str, int | None]]:
    """Explanation of one statement: the text, the decider, and the line."""
    return [
        (row.what, row.origin.decider, row.origin.span.line if row.origin.span else None)
        for row in decisions_of(analysis, path)
        if row.statement == statement
    ]


def line_of(words: str) -> int:
    return PLAN[: PLAN.index(words)].count("\n") + 1


def test_style_is_listed_with_lines_and_enclosing_styles(analysis: Analysis):
    assert rows(analysis, "layers.3.attention.wq", "shard on tp") == [
        ("colwise", "human", line_of("layers.*.attention.{wq")),
        (
            "around it, layers.3.attention: inputs(from = shard(1), to = replicate)",
            "human",
            line_of("layers.*.attention  "),
        ),
    ]


def test_module_without_a_style_is_explained_as_replicated(analysis: Analysis):
    assert rows(analysis, "norm", "shard on tp") == [("no rule: the same on every rank of tp", "default", None)]


def test_parameter_placement_is_listed_for_its_module(analysis: Analysis):
    assert rows(analysis, "output", "shard on tp") == [("weight is shard(0)", "human", line_of("output.weight"))]


def test_fsdp_unit_is_the_innermost_around_the_module(analysis: Analysis):
    assert rows(analysis, "layers.3.attention.wq", "fsdp on dp_shard")[:2] == [
        ("in the unit layers.3", "human", line_of("layers.* = unit")),
        ("reshard = after_backward", "human", line_of("layers.* = unit")),
    ]


def test_module_outside_of_units_belongs_to_the_root_unit(analysis: Analysis):
    for path in ("layers.1.attention.wq", "output"):
        assert rows(analysis, path, "fsdp on dp_shard")[0] == ("in the unit root", "default", None)
    assert rows(analysis, "", "fsdp on dp_shard")[0] == ("is a unit", "default", None)


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("tok_embeddings", "in stage 0 of 2 (counted from 0), on rank 0 of pp"),
        ("layers.1.attention", "in stage 0 of 2 (counted from 0), on rank 0 of pp"),
        ("layers.2", "in stage 1 of 2 (counted from 0), on rank 1 of pp"),
        ("output", "in stage 1 of 2 (counted from 0), on rank 1 of pp"),
        ("layers", "in several of 2 stages"),
        ("", "in several of 2 stages"),
    ],
)
def test_stage_is_numbered_in_model_order(analysis: Analysis, path: str, where: str):
    assert rows(analysis, path, "pipeline on pp")[0][0] == where


def test_module_that_every_stage_computes_is_in_each_of_them():
    text = """plan theirs
model    python("support.models.factories:build_with_table")
cluster  cpu(devices = 2)
batch    (global = 8, micro = 2, seq_len = 16)
mesh     (pp = 2)
pipeline on pp (schedule = 1F1B)
"""
    analysis = analysis_of(text)
    found = {path: rows(analysis, path, "pipeline on pp")[0][0] for path in ("table", "embeddings", "blocks.1", "head")}
    assert found.pop("table") == "in each of 2 stages"
    assert [what.split(" (")[0] for what in found.values()] == [f"in stage {stage} of 2" for stage in (0, 1, 1)]


def test_treatment_by_open_stage_is_undecided():
    text = PLAN.replace("  layers.*           = full\n", "  layers.* = stages([full, none])\n")
    assert rows(analysis_of(text), "layers.0", "checkpoint")[0][0] == "full"
    text = text.replace("mesh    (pp = 2, dp_shard = 2, tp = wide)", "mesh    (pp = auto, dp_shard = rest, tp = wide)")
    assert rows(analysis_of(text), "layers.0", "checkpoint")[0][0] == "by its stage, not decided yet"


def test_equal_stages_follow_from_the_blocks():
    text = PLAN.replace("split = [layers.2], ", "").replace("auto in [1F1B, GPipe] -> 1F1B", "ZBVZeroBubble")
    analysis = analysis_of(text)
    stages = [rows(analysis, f"layers.{index}", "pipeline on pp")[0][0].split(" (")[0] for index in range(4)]
    assert stages == [f"in stage {index} of 4" for index in range(4)]
    ranks = [rows(analysis, f"layers.{index}", "pipeline on pp")[0][0][-10:] for index in range(4)]
    assert ranks == ["rank 0 of pp"[-10:], "rank 1 of pp"[-10:], "rank 1 of pp"[-10:], "rank 0 of pp"[-10:]]


def test_solver_answer_is_marked_as_solver(analysis: Analysis):
    assert ("schedule = 1F1B", "solver", line_of("pipeline on")) in rows(analysis, "norm", "pipeline on pp")


def test_command_line_value_is_marked_as_command_line():
    analysis = analysis_of(
        PLAN.replace("preserve", "").replace("checkpoint {", "let keep = true\ncheckpoint (preserve_rng = keep) {"),
        keep="false",
    )
    assert ("preserve_rng = false", "command line", 1) in rows(analysis, "norm", "checkpoint")


def test_rule_and_enclosing_rules_are_listed(analysis: Analysis):
    assert [row[0] for row in rows(analysis, "layers.3.attention", "checkpoint")][:2] == [
        "none",
        "inside of layers.3: full",
    ]


def test_the_page_names_shapes_lines_and_defaults(analysis: Analysis):
    page = explain(analysis, "layers.0.attention.wq")
    assert page.startswith("layers.0.attention.wq: Linear, weight 128 × 128\nin the plan small\n")
    assert "s.plan:11\n" in page
    assert "s.plan:18 (solver)\n" in page
    assert "default\n" in page
    assert explain(analysis, "root").startswith("root: Llama\n")
    assert explain(analysis, "output.weight").startswith("output.weight: Linear, weight 256 × 128\n")


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("layers.0.atention.wq", "did you mean `attention`?"),
        ("layers.9", "`layers` holds `0`, `1`, `2`, `3`"),
        ("layers.40", "`layers` holds `0`, `1`, `2`, `3`"),
        ("layers.*", "a pattern; name one module or parameter, such as `layers.0`"),
        ("layers.{1..2}.attention.wq", "such as `layers.1.attention.wq`"),
        ("**.weight", "such as `tok_embeddings.weight`"),
        ("layers.{7..9}.attention.wq", "`layers` holds `0`, `1`, `2`, `3`"),
        ("layers.{0", "`layers` holds `0`, `1`, `2`, `3`"),
        ("output.bias", "`output` holds `weight`"),
        ("", "holds"),
    ],
)
def test_unknown_path_suggests_existing_paths(analysis: Analysis, path: str, hint: str):
    with pytest.raises(NoSuchModuleError) as caught:
        explain(analysis, path or "x.y")
    assert hint in str(caught.value)


def test_undecided_values_are_marked_undecided():
    analysis = analysis_of(
        PLAN.replace("layers.* = unit(reshard = after_backward)", "layers.* = auto")
        .replace("-> 1F1B", "")
        .replace("split = [layers.2]", "split = auto")
    )
    assert rows(analysis, "layers.0", "fsdp on dp_shard")[0][0] == "auto, not decided yet"
    assert rows(analysis, "layers.0", "pipeline on pp")[0][0] == "in a stage that is not decided yet"


def test_every_module_of_every_family_of_rules_can_be_explained(analysis: Analysis):
    assert analysis.manifest is not None
    for path in analysis.manifest.modules:
        assert explain(analysis, path or "root")


def test_defaults_of_a_plan_are_its_undecided_options(analysis: Analysis):
    found = {(owner, option): value for owner, option, value in defaults_of(analysis)}
    assert found["mesh", "cp"] == "1"
    assert found["precision", "param"] == "bf16"
    assert ("mesh", "tp") not in found
    assert ("pipeline", "schedule") not in found


@pytest.mark.parametrize(
    ("owner", "option", "text"),
    [pytest.param(*item, id=f"{item[0]}-{item[1].name}") for item in defaults()],
)
def test_a_default_is_written_as_a_plan_would_write_it(owner: str, option: Option, text: str):
    [statement] = parse(f"let x = {text}", "t.plan").file.statements
    assert isinstance(statement, Let)
    diagnostics: list[Diagnostic] = []
    value, _ = Reader(Scope({}), diagnostics).value(statement.value, option.kind)
    assert diagnostics == []
    assert describe(value) == describe(option.default)


def test_every_default_of_a_directive_is_listed():
    listed = {(owner, option.name) for owner, option, _ in defaults()}
    for keyword in FAMILIES:
        for option in family(keyword).options:
            if not option.required and option.default is not None:
                assert (keyword, option.name) in listed


def test_parameter_constants_come_from_the_nearest_rule():
    rules = "{ layers.*.attention = group(lr_scale = 0.5), layers.*.attention.wq.weight = group(weight_decay = 0) }"
    analysis = analysis_of(f"{PLAN}optimizer adamw(lr = 3e-4) {rules}\n")
    line = PLAN.count("\n") + 1
    assert rows(analysis, "layers.0.attention.wq", "optimizer") == [
        ("weight: group(weight_decay = 0)", "human", line),
    ]
    assert rows(analysis, "layers.0.attention.wk", "optimizer") == [("weight: group(lr_scale = 0.5)", "human", line)]
    assert rows(analysis, "norm", "optimizer") == [("weight: as the statement says", "default", None)]
    assert not rows(analysis_of(PLAN), "norm", "optimizer")
