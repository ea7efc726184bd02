"""An expanded plan shows every default, can be read, and is the same plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.formatting.expand import expand
from legoai.dsl.formatting.formatter import format_text
from legoai.dsl.frontend.parsing.parse import parse
from legoai.dsl.frontend.resolve import Resolution, resolve
from legoai.specs.directives import FAMILIES, family
from legoai.specs.directives.base import Declared
from legoai.specs.span import Origin
from support import VALID_PLANS, WORKED_PLANS

PLANS = WORKED_PLANS + VALID_PLANS
HEAD = 'plan a\nmodel llama3("tiny")\ncluster cpu(devices = 4)\nbatch (global = 4, micro = 1, seq_len = 64)\n'


def resolved(text: str, variant: str | None = None, directory: Path = Path()) -> Resolution:
    resolution = resolve(text, "t.plan", directory=directory, variant=variant)
    assert resolution.plan is not None
    assert [item for item in resolution.diagnostics if item.severity == "error"] == []
    return resolution


def undecided(declared: Declared) -> list[str]:
    """The options that the plan leaves to a default which could be written."""
    return [
        option.name
        for option in declared.options
        if declared.origin(option.field) == Origin("default") and option.default is not None and not option.required
    ]


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_expanded_plan_resolves_to_the_same_plan(path: Path):
    text = path.read_text(encoding="utf-8")
    before = resolved(text, directory=path.parent)
    after = expand(before).text
    assert before.plan is not None
    for variant in (None, *before.variants):
        one, other = (resolved(item, variant, path.parent).plan for item in (text, after))
        assert one is not None
        assert other is not None
        assert one.digest == other.digest
    assert format_text(after, path.name).text == after
    again = resolved(after, directory=path.parent)
    assert expand(again).text == after
    comments = [item.text for item in parse(text, "t.plan").file.comments]
    assert [item.text for item in parse(after, "t.plan").file.comments] == comments


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_expanded_plan_shows_every_default(path: Path):
    plan = resolved(expand(resolved(path.read_text("utf-8"), directory=path.parent)).text, directory=path.parent).plan
    assert plan is not None
    for directive in plan.directives():
        span = directive.origin("keyword").span
        if span is not None and span.file != "t.plan":
            continue  # a statement of the base plan stays there
        assert undecided(directive) == [], directive.keyword
        for rule in directive.rules:
            assert undecided(rule.treatment) == [], rule.path


def test_defaults_are_added_where_the_plan_leaves_them_out():
    text = expand(resolved(HEAD + "compile {\n  layers.* = inductor  # why\n}\n")).text
    assert "  layers.* = inductor(mode = default, fullgraph = true, dynamic = false)  # why\n" in text
    assert "compile (async_tp = false) {\n" in text
    assert text.endswith(
        "\n\n"
        "mesh      (pp = 1, dp_replicate = 1, dp_shard = 1, cp = 1, tp = 1, ep = 1)\n"
        "precision (master = fp32, param = bf16, reduce = fp32)\n"
        "attention default\n"
        "loss      eager\n"
        "optimizer adamw(lr = 0.001, betas = [0.9, 0.999], eps = 1e-8, weight_decay = 0.01, fused = true)\n"
        "schedule  constant(warmup = 0)\n"
    )


def test_sizes_are_written_with_their_unit():
    text = expand(resolved(HEAD + "mesh (dp_replicate = 4)\nreplicate on dp_replicate\n")).text
    assert "replicate on dp_replicate (bucket = 25MiB, optimizer = replicated)\n" in text


def test_axes_are_added_in_the_order_of_nesting():
    text = expand(resolved(HEAD + "mesh (\n  dp_shard = 2  # halves\n  # inside of a host\n  tp = 2\n)\n")).text
    lines = ["pp = 1", "dp_replicate = 1", "dp_shard = 2", "cp = 1", "tp = 2", "ep = 1"]
    found = text[text.index("mesh") :].partition(")")[0].splitlines()[1:]
    assert [" ".join(line.split("#")[0].split()) for line in found if not line.strip().startswith("#")] == lines
    assert found[2].endswith("# halves")
    assert found[found.index("  # inside of a host") + 1].split()[0] in ("cp", "tp")


def test_holes_and_let_names_stay_as_they_are():
    text = HEAD + "let fast = adam(lr = 1e-3)\nlet n = 2\nmesh (tp = n, pp = auto in [1, 2] -> 2)\noptimizer fast\n"
    after = expand(resolved(text)).text
    assert "let fast = adam(lr = 1e-3)\n" in after
    assert "tp = n, pp = auto in [1, 2] -> 2, dp_replicate = 1" in after  # not nested, and left so
    assert "optimizer fast\n" in after


def test_statement_with_a_subject_has_no_other_options():
    """Options after a value would be parsed as its arguments, so such a statement could not be expanded."""
    for keyword in FAMILIES:
        declared = family(keyword)
        if declared.subject is not None and not declared.subject_holds_options:
            assert [option.field for option in declared.options] == [declared.subject]
