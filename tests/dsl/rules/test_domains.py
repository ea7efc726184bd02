"""A hole whose domain holds no legal value is reported, and one that holds some is not."""

from __future__ import annotations

import pytest

from legoai.dsl.rules import domains
from support.texts.rule_plans import BASE, diagnostics

HOSTS = BASE.replace("cluster h100_sxm", "cluster h100_sxm(hosts = 4, fabric = infiniband_ndr)")
FSDP = "fsdp on dp_shard { layers.* = unit }\n"
TP = "shard on tp { layers.*.feed_forward.{w1, w3} = colwise, layers.*.feed_forward.w2 = rowwise }\n"


def found(text: str) -> list[str]:
    whole = f'plan test\nextends "base.plan"\n{text}'
    items = lint_of(text)
    return [whole[item.label.span.start : item.label.span.end] for item in items if item.code == "LP220"]


def lint_of(text: str):
    from pathlib import Path

    from legoai.dsl.lint import lint

    return lint(
        f'plan test\nextends "base.plan"\n{text}', "t.plan", directory=Path(), read=lambda path: HOSTS
    ).diagnostics


EMPTY = [
    ("mesh (dp_shard = auto in [8, 16])\n" + FSDP, "auto in [8, 16]"),
    ("mesh (dp_shard = auto, tp = auto in [3, 5])\n" + FSDP + TP, "auto in [3, 5]"),
    ("mesh (dp_shard = 4, tp = auto in [3, 5])\n" + FSDP + TP, "auto in [3, 5]"),
    ("let n = auto in [8, 16]\nmesh (dp_shard = n)\n" + FSDP, "auto in [8, 16]"),
    ("mesh (dp_shard = 32)\n" + FSDP + "batch (global = 64, micro = auto in [3, 5], seq_len = 256)", "auto in [3, 5]"),
    ("mesh (dp_shard = 32)\n" + FSDP + "batch (global = auto in 33..40, micro = 1, seq_len = 256)", "auto in 33..40"),
    (
        "mesh (pp = 4, dp_shard = 8)\nfsdp on dp_shard { layers.* = unit(reshard = after_backward) }\n"
        "batch (global = 64, micro = 1, seq_len = 256)\n"
        "pipeline on pp (schedule = Interleaved1F1B, stages = auto in [6, 7])",
        "auto in [6, 7]",
    ),
]


@pytest.mark.parametrize(("text", "hole"), EMPTY)
def test_a_domain_without_a_legal_value_is_reported(text: str, hole: str):
    assert found(text) == [hole]


def test_incompatible_domains_are_reported():
    text = "mesh (dp_shard = auto in [4, 8], tp = auto in [1, 2])\n" + FSDP + TP
    assert found(text) == ["auto in [1, 2]"]


LEGAL = [
    "mesh (dp_shard = auto in [8, 16, 32])\n" + FSDP,
    "mesh (dp_shard = auto)\n" + FSDP,
    "mesh (dp_shard = auto, tp = auto in [3, 4])\n" + FSDP + TP,
    "mesh (dp_shard = auto in [8, 16], tp = auto in [2, 4])\n" + FSDP + TP,
    "mesh (dp_shard = auto in [8, 16] -> 16, tp = 2)\n" + FSDP + TP,
    "mesh (dp_shard = 32)\n" + FSDP + "batch (global = 64, micro = auto in [1, 5], seq_len = 256)",
]


@pytest.mark.parametrize("text", LEGAL)
def test_a_domain_with_a_legal_value_is_clean(text: str):
    assert [item.code for item in lint_of(text) if item.severity == "error"] == []


LONG = "auto in 1..1000000007"


@pytest.mark.parametrize("micro", ["3", "auto in [3, 5]"])
def test_domain_of_billions_is_not_tried(micro: str, monkeypatch: pytest.MonkeyPatch):
    tried = []
    with_values = domains.with_values
    monkeypatch.setattr(domains, "with_values", lambda *given: tried.append(given) or with_values(*given))
    text = f"mesh (dp_shard = {LONG}, cp = {LONG})\n{FSDP}batch (global = 64, micro = {micro}, seq_len = 256)"
    found(text)
    assert len(tried) == (2 if "auto" in micro else 0)


@pytest.mark.parametrize(("answer", "legal"), [("2", True), ("after_forward", False), ("2000000000", False)])
def test_answer_in_a_domain_of_billions_is_found_at_once(answer: str, legal: bool):
    text = f"mesh (dp_shard = 32)\nfsdp on dp_shard {{ layers.* = unit(reshard = auto in 2..1000000007 -> {answer}) }}"
    assert ("LP220" in {item.code for item in lint_of(text)}) is not legal


def test_decided_axes_must_divide_the_devices():
    items = lint_of("mesh (dp_shard = auto, tp = 3)\n" + FSDP + TP)
    assert [item.message for item in items if item.code == "LP301"] == ["`tp` = 3 does not divide the 32 devices"]


def test_a_plan_without_holes_is_checked_once():
    assert diagnostics("mesh (dp_shard = 8)\n" + FSDP) == []
