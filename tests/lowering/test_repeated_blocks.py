"""The lists of blocks of which a lowered program treats every block equally."""

from __future__ import annotations

import pytest

from support.plans import lowered

PLAN = """\
plan tiny

model     llama3("tiny", n_layers = 12)
cluster   cpu(devices = 2)
batch     (global = 4, micro = 1, seq_len = 32)
optimizer adamw(lr = 1e-3)
mesh      ({mesh})
{body}
"""
UNITS = "fsdp on dp_shard {{ layers.* = unit, root = unit }}\n{}"


def repeated(body: str, mesh: str = "dp_shard = 2") -> tuple[str, ...]:
    return lowered(PLAN.format(mesh=mesh, body=body)).repeated_blocks


@pytest.mark.parametrize(
    "body",
    [
        "fsdp on dp_shard { root = unit }",
        UNITS.format(""),
        UNITS.format("checkpoint { layers.* = full }"),
        UNITS.format("comm (prefetch = units(2, 2))"),
        UNITS.format("offload (parameters = all, activations = all)"),
    ],
)
def test_a_program_that_goes_over_whole_lists_treats_their_blocks_equally(body: str):
    assert repeated(body) == ("layers",)


def test_the_stages_of_a_pipeline_are_treated_equally():
    assert repeated("pipeline on pp (schedule = 1F1B)", "pp = 2") == ("layers",)


@pytest.mark.parametrize(
    "body",
    [
        UNITS.format("checkpoint { layers.3 = full }"),
        UNITS.format("checkpoint { layers.* = every(2) }"),
        UNITS.format("checkpoint { layers.{2..5} = full }"),
        "fsdp on dp_shard { layers.3.attention = unit, root = unit }",
        "fsdp on dp_shard { layers.{0..10} = unit, root = unit }",
        UNITS.format("comm { layers.* = bucket(group) }"),
        UNITS.format("comm (prefetch = units(3, 2))"),
        "fsdp on dp_shard { layers.{1..11} = unit, root = unit }\ncomm (prefetch = units(1, 1))",
    ],
)
def test_a_program_that_names_some_blocks_does_not(body: str):
    assert repeated(body) == ()
