"""`overlap` of styles on `tp`: where it has an effect, and which statements exclude it."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.parallelism.overlap import possibly_overlapped
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan
from legoai.dsl.open_rules import with_open_rules
from legoai.specs.directives.hole import Undecided
from support.texts.rule_plans import codes, diagnostics

BASE = """\
model llama3("tiny", n_layers = 2)
mesh (dp_shard = 4, tp = 2)
shard standard on tp (sequence, loss_parallel, overlap) {{ {rules} }}
fsdp blocks on dp_shard
{more}
"""
GATHER = "inputs(from = shard(1), to = replicate, overlap = backward)"


def text(*rules: str, more: str = "") -> str:
    return BASE.format(rules=", ".join(rules), more=more)


def message(code: str, plan: str) -> str:
    """Messages of all diagnostics with one code."""
    return "\n".join(item.message for item in diagnostics(plan) if item.code == code)


def errors(plan: str) -> set[str]:
    return {item.code for item in diagnostics(plan) if item.severity == "error"}


def test_standard_sequence_layout_supports_overlap() -> None:
    assert errors(text()) == set()


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (
            "layers.*.attention = inputs(from = replicate, to = replicate, overlap = backward)",
            "does not gather one input",
        ),
        (
            "layers.*.attention = inputs(from = shard(1), to = shard(1), overlap = backward)",
            "does not gather one input",
        ),
        (f"layers.*.attention = {GATHER[:-1]}, local = true)", "takes plain tensors"),
        (
            f"layers.*.attention = {GATHER[:-1]}, then = outputs(from = replicate, to = shard(1)))",
            "converts outputs too",
        ),
        (f"layers.* = {GATHER}", "gives its input to `attention_norm`"),
        ("layers.*.attention.wk = colwise(input = shard(1))", "gives its input to `wk`"),
        ("layers.*.attention.wk = none", "gives its input to `wk`"),
        ("output = colwise(overlap = backward, loss_parallel = true)", "does not gather its input"),
        ("tok_embeddings = colwise(output = shard(1), overlap = backward)", "is no linear layer"),
    ],
)
def test_overlap_requires_a_gather_for_colwise_layers_only(rule: str, why: str) -> None:
    assert why in message("LP428", text(rule))


def test_module_that_reads_its_own_input_refuses_overlap() -> None:
    """The feed-forward of a mixture routes its input."""
    plan = text(f"layers.*.feed_forward = {GATHER}").replace("llama3", "mixtral")
    assert "reads its input itself" in message("LP428", plan)


def test_overlap_on_one_rank_is_idle() -> None:
    plan = text().replace("dp_shard = 4, tp = 2", "dp_shard = 8, tp = 1")
    assert "LP307" in codes(plan)
    assert "LP428" not in codes(plan)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("compile { layers.* = inductor }", "`layers.*` is compiled"),
        ("compile { layers.*.attention.wq = aot_eager }", "`layers.*.attention.wq` is compiled"),
        ("precision { layers.*.attention.wk = float8 }", "`layers.*.attention.wk` computes in float8"),
        ("checkpoint { layers.*.attention.wv = full }", "`checkpoint` treats `layers.*.attention.wv` apart"),
    ],
)
def test_other_treatments_of_overlapped_layers_are_refused(more: str, why: str) -> None:
    assert why in message("LP010", text(more=more))


def test_layers_of_their_own_units_are_refused() -> None:
    plan = text().replace("fsdp blocks on dp_shard", "fsdp blocks on dp_shard { layers.*.feed_forward.w1 = unit }")
    assert "`fsdp` treats `layers.*.feed_forward.w1` apart" in message("LP010", plan)
    assert errors(plan.replace("w1 = unit", "w2 = unit")) == set()


def test_the_graph_backend_orders_collectives_itself() -> None:
    plan = text().replace("fsdp blocks on dp_shard", "fsdp blocks on dp_shard (backend = graph)")
    assert "`backend = graph` orders" in message("LP010", plan)


def test_a_schedule_that_splits_the_backward_is_refused() -> None:
    plan = text().replace("dp_shard = 4, tp", "pp = 2, dp_shard = 2, tp")
    staged = plan.replace("fsdp blocks on dp_shard", "fsdp on dp_shard { layers.* = unit(reshard = after_backward) }")
    assert errors(staged + "pipeline on pp (schedule = 1F1B)\n") == set()
    assert "gradients of weights apart" in message("LP010", staged + "pipeline on pp (schedule = ZBVZeroBubble)\n")


@pytest.mark.parametrize("more", ["checkpoint { layers.* = full }", "checkpoint { output = full }", "attention flash"])
def test_treatments_of_the_whole_module_support_overlap(more: str) -> None:
    assert errors(text(more=more)) == set()


GATHERS_ONCE = "inputs(from = shard(1), to = replicate)"


def open_styles(shard: str) -> Analysis:
    text = (
        'plan open\nmodel llama3("8b")\ncluster h100_sxm(devices = 8)\nbatch (global = 8, micro = 1, seq_len = 2048)\n'
        f"mesh (dp_shard = 4, tp = 2)\n{shard}\nfsdp blocks on dp_shard\n"
    )
    linted = lint(text, "open.plan", directory=Path())
    opened = OpenPlan(with_open_rules(linted, directory=Path()), directory=Path())
    analysis = opened.candidate((None,) * len(opened.holes)).analysis
    assert analysis is not None
    return analysis


def test_open_styles_overlap_only_if_a_listed_style_does():
    rules = "shard on tp {{ layers.*.feed_forward = auto in [{}, {}] }}"
    assert possibly_overlapped(open_styles("shard auto on tp")) == {}
    assert possibly_overlapped(open_styles(rules.format(GATHERS_ONCE, "none"))) == {}
    with pytest.raises(Undecided):
        possibly_overlapped(open_styles(rules.format(GATHERS_ONCE, GATHER)))
