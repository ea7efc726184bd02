"""Statements without effect are reported: bare statements, empty variants, and unused lets."""

from __future__ import annotations

import pytest

from support.texts.rule_plans import codes, diagnostics, place

FSDP = "mesh (dp_shard = 8)\nfsdp on dp_shard { layers.* = unit }\n"

BARE = [
    "checkpoint", "compile", "comm", "checkpoint { }", "compile ( ) { }", "shard on tp", "shard on tp { }", "precision",
    "attention", "loss", "optimizer", "schedule", "checkpoint { layers.* = none }", "compile { layers.* = none }",
    "precision { layers.* = none }",
]  # fmt: skip


@pytest.mark.parametrize("statement", BARE)
def test_bare_statement_is_reported(statement: str):
    assert place(FSDP + statement, "LP906") == statement.split()[0]


@pytest.mark.parametrize(
    "statement",
    [
        "checkpoint { layers.* = full }",
        "checkpoint { layers.* = full, layers.0 = none }",
        "compile { layers.* = inductor }",
        "comm (reduce = last_micro_batch)",
        "precision (param = bf16)",
        "attention default",
        "optimizer adamw",
        "schedule constant",
    ],
)
def test_statement_with_content_is_not_reported(statement: str):
    assert "LP906" not in codes(FSDP + statement)


def test_an_empty_mesh_is_reported():
    assert "LP906" in codes("cluster h100_sxm(devices = 1)\nmesh ( )")


def test_bare_statement_may_replace_another_in_a_variant():
    text = FSDP + "checkpoint { layers.* = full }\nvariant v { checkpoint }"
    assert "LP906" not in codes(text)


@pytest.mark.parametrize("body", ["", "clip (norm = 1.0)", "let n = 2", "clip (norm = n / 2)", "mesh (dp_shard = 8)"])
def test_variant_without_changes_is_reported(body: str):
    text = f"{FSDP}let n = 2\nclip (norm = n - 1)\nvariant v {{ {body} }}"
    assert "LP907" in codes(text)


@pytest.mark.parametrize("body", ["clip (norm = 2.0)", "let n = 3", "unset clip", "checkpoint { layers.* = full }"])
def test_variant_with_changes_is_not_reported(body: str):
    text = f"{FSDP}let n = 2\nclip (norm = n - 1)\nvariant v {{ {body} }}"
    assert "LP907" not in codes(text)


WANTED = FSDP + "require peak_memory <= 40GiB\nrequire mfu >= 10%\nminimize step_time\n"


@pytest.mark.parametrize("body", ["require peak_memory <= 20GiB", "require bubble <= 5%", "minimize peak_memory"])
def test_variant_that_only_wants_something_else_is_not_reported(body: str):
    assert "LP907" not in codes(f"{WANTED}variant v {{ {body} }}")


@pytest.mark.parametrize("body", ["require peak_memory <= 40GiB", "minimize step_time"])
def test_variant_that_wants_the_same_is_reported(body: str):
    assert "LP907" in codes(f"{WANTED}variant v {{ {body} }}")


def test_domain_of_billions_is_compared_at_once():
    text = "mesh (dp_shard = auto in 1..1000000007)\nfsdp on dp_shard { layers.* = unit }\n"
    assert "LP907" in codes(f"{text}variant v {{ mesh (dp_shard = auto in 1..1000000007) }}")
    assert "LP907" not in codes(f"{text}variant v {{ mesh (dp_shard = auto in 1..1000000008) }}")


UNUSED = [
    "variant v { let n = 2\nclip (norm = 1.0) }",
    "let n = 2\nvariant v { let n = 3\nclip (norm = n) }",
    "let n = 2\nlet m = n\nclip (norm = 1.0)",
]


@pytest.mark.parametrize("text", UNUSED)
def test_unused_let_is_reported(text: str):
    found = [item for item in diagnostics(FSDP + text) if item.code == "LP901"]
    assert found


@pytest.mark.parametrize(
    "text",
    [
        "variant v { let n = 2\nclip (norm = n) }",
        "let n = 2\nclip (norm = n)\nvariant v { let n = 3 }",
        "let n = 2\nvariant v { clip (norm = n) }",
    ],
)
def test_let_used_by_plan_or_variant_is_not_reported(text: str):
    assert "LP901" not in codes(FSDP + text)


def test_async_tp_needs_a_sequence_in_pieces():
    text = "mesh (tp = 8)\ncompile (async_tp = true) { layers.* = inductor }\n"
    plain = "shard on tp { layers.*.feed_forward.{w1, w3} = colwise, layers.*.feed_forward.w2 = rowwise }"
    assert "LP626" in codes(text + plain)


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        ("layers.* = first(4, full)", True),
        ("layers.* = first(3, full)", False),
        ("layers.{0..1} = first(2, full)", True),
        ("layers.{0..1} = first(1, full)", False),
        ("layers.* = first(2, none)", True),
        ("layers.* = first(2, selective([attention]), others = selective([attention]))", True),
        ("layers.* = first(2, selective([attention]), others = selective([matmul]))", False),
    ],
)
def test_first_n_treatment_of_too_few_modules_is_reported(rule: str, found: bool) -> None:
    assert ("LP908" in codes(f"checkpoint {{ {rule} }}")) is found


@pytest.mark.parametrize(
    ("each", "found"),
    [
        ("full, full", True),
        ("full, none", False),
        ("first(2, full), none", True),
        ("first(1, full), none", False),
        ("first(1, full), first(1, full)", False),
        ("first(1, full, others = full), none", True),
    ],
)
def test_equal_treatments_of_all_stages_are_reported(each: str, found: bool) -> None:
    text = f"mesh (pp = 2, dp_shard = 4)\npipeline on pp\ncheckpoint {{ layers.* = stages([{each}]) }}"
    assert ("LP908" in codes(text)) is found
