"""Rules about `none`: an exception that takes no treatment away is reported."""

from __future__ import annotations

import pytest

from support.texts.rule_plans import codes, message, place

TP = "mesh (tp = 8)\n"
MIXTURE = """
plan base
model   mixtral("tiny")
cluster cpu(devices = 4)
batch   (global = 64, micro = 8, seq_len = 128)
mesh    (dp_shard = 4, ep = 2)
shard on ep { layers.*.feed_forward.experts = experts }
"""
EXPERTS = "layers.*.feed_forward.experts"


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("checkpoint { layers.* = full, layers.*.attention = none }", "`layers.0` is recomputed as a whole"),
        ("checkpoint { layers.* = every(2), layers.*.attention = none }", "`layers.1` is recomputed as a whole"),
        (
            "checkpoint { layers.*.{attention, feed_forward} = full, layers.0 = none }",
            "`layers.0` itself has no other treatment, and `layers.0.attention` keeps `full`",
        ),
        (
            "precision { layers.*.feed_forward.* = float8, layers.0 = none }",
            "`layers.0` itself has no other treatment, and `layers.0.feed_forward.w1` keeps `float8`",
        ),
        (
            "precision { layers.*.feed_forward.* = float8, layers.0.** = none }",
            "`layers.0.feed_forward` itself has no other treatment, and `layers.0.feed_forward.w1` keeps `float8`",
        ),
        (
            "compile { layers.*.{attention, feed_forward} = inductor, layers.0 = none }",
            "`layers.0` itself has no other treatment, and `layers.0.attention` keeps `inductor`",
        ),
        (
            "checkpoint { layers.*.attention = first(2, none, others = full), layers.3 = none }",
            "`layers.3` itself has no other treatment, and `layers.3.attention` keeps `full`",
        ),
    ],
)
def test_none_without_effect_is_reported(statement: str, text: str) -> None:
    assert message(statement, "LP909") == f"`none` has no effect: {text}"


def test_none_around_standard_styles_is_reported() -> None:
    plan = f"{TP}shard standard on tp {{ layers.0 = none }}"
    assert "`layers.0.attention.wq` keeps `colwise`" in message(plan, "LP909")
    assert place(plan, "LP909") == "layers.0"
    assert "LP909" not in codes(f"{TP}shard standard on tp {{ layers.0.attention.wq = none }}")


@pytest.mark.parametrize(
    "statement",
    [
        "checkpoint { layers.* = full, layers.0 = none }",
        "checkpoint { layers.* = full, layers.*.* = full, layers.*.feed_forward = none }",
        "checkpoint { layers.*.attention = first(2, none, others = full), layers.1 = none, layers.2 = full }",
        "checkpoint { ** = none, layers.* = full }",
        "checkpoint { layers.** = none, layers.* = full }",
        "checkpoint { layers.{0..1} = full, layers.*.* = full, layers.{0..1}.* = none }",
        "checkpoint { layers.* = none, layers.*.attention = full }",
        "checkpoint { layers.* = auto in [full, none], layers.*.attention = none }",
        "compile { root = none, layers.* = inductor }",
        "compile { layers.0 = none, layers.0.attention = inductor, layers.1 = inductor }",
        "precision { layers.*.feed_forward.* = float8, layers.0.feed_forward.* = none }",
        "fsdp blocks on dp_shard { layers.0 = none }",
    ],
)
def test_none_with_effect_is_accepted(statement: str) -> None:
    assert "LP909" not in codes(f"mesh (dp_shard = 8)\n{statement}")


def test_none_for_experts_on_ep_is_reported() -> None:
    plan = f"fsdp on dp_shard {{ layers.* = unit, {EXPERTS} = none }}"
    assert "a unit of its own" in message(plan, "LP909", base=MIXTURE)
    assert "LP909" not in codes(plan, base=MIXTURE.replace(", ep = 2", ""))
    assert "LP909" not in codes(f"fsdp on dp_shard {{ layers.* = unit, {EXPERTS} = unit }}", base=MIXTURE)
