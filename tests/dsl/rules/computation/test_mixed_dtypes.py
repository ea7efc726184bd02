"""Operators that get tensors in fp32 beside parameters in bf16 are reported where no unit casts these."""

from __future__ import annotations

import pytest

from support.texts.rule_plans import diagnostics

UNITS = "mesh (dp_shard = 8)\nfsdp on dp_shard { blocks.* = unit }\n"
BUFFER = "from the buffer `blocks.0.offset`"


def messages(kind: str, text: str) -> list[str]:
    found = diagnostics(f'model python("support.models.other_authors:build", kind = "{kind}")\n{text}')
    return [item.message for item in found if item.code == "LP644"]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("buffered", f"`layer_norm` in `blocks.*.norm` gets a tensor in fp32, {BUFFER}"),
        ("multiplied", f"`matmul` in `blocks.*` gets a tensor in fp32, {BUFFER}"),
        ("made", "`linear` in `blocks.*.layer` gets a tensor in fp32, from the result of `linspace` in `blocks.0`"),
        ("rotated", f"`scaled_dot_product_attention` in `blocks.*` gets a tensor in fp32, {BUFFER}"),
    ],
)
def test_wide_tensors_are_reported(kind: str, words: str):
    for text in (UNITS, "mesh (dp_replicate = 8)\nreplicate on dp_replicate\n"):
        [found] = messages(kind, text)
        assert found.startswith(words)
    assert messages(kind, f"{UNITS}precision (master = bf16, param = bf16)\n")
    assert messages(kind, "mesh (dp_shard = 8)\nprecision (master = bf16, param = bf16)\n")


@pytest.mark.parametrize("text", [f"{UNITS}precision (param = fp32)\n", "mesh (tp = 8)\n"])
def test_one_dtype_and_autocast_are_not_reported(text: str):
    assert not messages("buffered", text)


@pytest.mark.parametrize("kind", ["plain", "cast", "autocast"])
def test_models_that_cast_are_not_reported(kind: str):
    assert not messages(kind, UNITS)


@pytest.mark.parametrize(
    ("kind", "units", "is_wrong"),
    [
        ("shifted", "blocks.* = unit", False),
        ("shifted", "root = unit", True),
        ("buffered", "blocks.*.norm = unit", False),
        ("made", "blocks.*.norm = unit", True),
        ("made", "blocks.*.layer = unit", False),
    ],
)
def test_units_cast_what_they_are_called_with(kind: str, units: str, is_wrong: bool):
    assert bool(messages(kind, f"mesh (dp_shard = 8)\nfsdp on dp_shard {{ {units} }}\n")) is is_wrong
