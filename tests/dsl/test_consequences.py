"""Consequences of a mistake are not reported as long as the mistake itself is."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.lint import lint

HEAD = 'plan t\nmodel llama3("70b")\n'
CLUSTER = "cluster h100_sxm\n"
BATCH = "batch (global = 64, micro = 1, seq_len = 256)\n"
FSDP = "fsdp on dp_shard { layers.* = unit }\n"


def codes(text: str) -> list[str]:
    return [item.code for item in lint(HEAD + text, "t.plan", directory=Path()).diagnostics]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (CLUSTER + BATCH + "mesh (dp = 4, tp = 2)\n" + FSDP, ["LP204"]),
        (CLUSTER + BATCH + "mesh (dp_shard = 8, dp_shard = 4)\n" + FSDP, ["LP206"]),
        (CLUSTER + "batch (globl = 64, micro = 1, seq_len = 256)\nmesh (dp_shard = 8)\n" + FSDP, ["LP204"]),
        ("cluster h100_sxm(host = 4, fabric = infiniband_ndr)\n" + BATCH + "mesh (dp_shard = 32)\n" + FSDP, ["LP204"]),
        (CLUSTER + BATCH + "mesh (dp_shard = 8)\nfsdp on dp_shard { layrs.* = unit }\n", ["LP210"]),
        ("let n = 8\n" + CLUSTER + BATCH + "mesh (dp_shard = 8)\n" + FSDP + "clip (nrm = n)\n", ["LP204"]),
        (CLUSTER + BATCH + "mesh (dp_shard = 16)\n" + FSDP, ["LP301"]),
        (CLUSTER + BATCH + "mesh (dp = 4, tp = 2)  # legoai: ignore[LP301]\n" + FSDP, ["LP204"]),
    ],
)
def test_only_causes_are_reported(text: str, cause: list[str]):
    assert codes(text) == cause


def test_suppressed_cause_does_not_hide_consequences():
    text = CLUSTER + BATCH + "mesh (dp_shard = 4)  # legoai: ignore[LP301]\n" + FSDP
    assert codes(text) == ["LP704"]
