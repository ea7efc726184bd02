"""Treatments by stage: as many as the stages, and for modules inside of these."""

from __future__ import annotations

import pytest

from support.texts.rule_plans import codes, place

PIPELINE = "mesh (pp = 2, dp_shard = 4)\npipeline on pp\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{PIPELINE}checkpoint {{ layers.* = stages([full, none]) }}", False),
        (f"{PIPELINE}checkpoint {{ layers.* = stages([full]) }}", True),
        (f"{PIPELINE}checkpoint {{ layers.* = stages([full, none, none]) }}", True),
        (f"{PIPELINE}fsdp on dp_shard {{ layers.* = stages([unit, unit(reshard = after_backward)]) }}", False),
        (f"{PIPELINE}fsdp on dp_shard {{ layers.* = stages([unit, unit(reshard = after_backward), none]) }}", True),
        (f"{PIPELINE}checkpoint {{ root = stages([full, none]) }}", True),
        ("mesh (dp_shard = 8)\ncheckpoint { layers.* = stages([full]) }", True),
        ("mesh (pp = 1, dp_shard = 8)\npipeline on pp\ncheckpoint { layers.* = stages([full]) }", True),
        (
            "mesh (pp = 2, dp_shard = 4)\npipeline on pp (schedule = Interleaved1F1B)\n"
            "checkpoint { layers.* = stages([full, full, none, none]) }",
            False,
        ),
    ],
)
def test_one_treatment_for_each_stage(text: str, found: bool) -> None:
    assert ("LP521" in codes(text)) is found


def test_wrong_stage_list_is_underlined() -> None:
    assert place(f"{PIPELINE}checkpoint {{ layers.* = stages([full]) }}", "LP521") == "[full]"


def test_open_stages_have_no_diagnostic() -> None:
    text = "mesh (pp = auto, dp_shard = rest)\npipeline on pp\ncheckpoint { layers.* = stages([full, none]) }"
    assert codes(text).isdisjoint({"LP521", "LP908"})
