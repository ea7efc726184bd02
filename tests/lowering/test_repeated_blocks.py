"""Classes of the blocks of a model: a lowered program treats the blocks of a class equally."""

from __future__ import annotations

import pytest

from support.marks import slow_but
from support.texts.plans import lowered

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


def classes(body: str, mesh: str = "dp_shard = 2") -> str:
    [(path, of_block)] = lowered(PLAN.format(mesh=mesh, body=body)).block_classes
    assert path == "layers"
    return "".join(map(str, of_block))


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
def test_blocks_of_whole_list_loops_share_a_class(body: str):
    assert classes(body) == "0" * 12


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("fsdp on dp_shard { root = unit }\ncompile { root = inductor }", False),
        ("fsdp on dp_shard { root = unit }\ncompile { root = aot_eager }", True),
        ("fsdp on dp_shard { root = unit }\ncompile { layers.* = inductor }", True),
        (UNITS.format("compile { root = inductor(fullgraph = false) }"), True),
    ],
)
def test_blocks_in_one_graph_of_inductor_have_no_classes(body: str, expected: bool):
    found = lowered(PLAN.format(mesh="dp_shard = 2", body=body)).block_classes
    assert [path for path, _ in found] == ["layers"] * expected


def test_blocks_of_equal_stages_share_a_class():
    assert classes("pipeline on pp (schedule = 1F1B)", "pp = 2") == "0" * 12


def test_blocks_of_separately_treated_stages_have_separate_classes():
    body = "checkpoint { layers.* = stages([first(4, full), first(1, full)]) }"
    assert classes(f"pipeline on pp (schedule = 1F1B)\n{body}", "pp = 2") == "000011011111"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (UNITS.format("checkpoint { layers.3 = full }"), "000100000000"),
        (UNITS.format("checkpoint { layers.* = every(2) }"), "010101010101"),
        (UNITS.format("checkpoint { layers.{2..5} = full }"), "001111000000"),
        (UNITS.format("checkpoint { layers.{2..5} = full, layers.{6..11} = every(3) }"), "001111002002"),
        (UNITS.format("checkpoint { layers.* = first(5, full) }"), "000001111111"),
        (UNITS.format("comm (prefetch = units(3, 2))"), "000000000000"),
        (UNITS.format("checkpoint { layers.* = every(2) }\ncomm (prefetch = units(3, 2))"), "010101010101"),
        ("fsdp on dp_shard { layers.* = first(4, unit, others = unit(reshard = never)) }", "000011111111"),
        ("fsdp on dp_shard { layers.3.attention = unit, root = unit }", "000100000000"),
        ("fsdp on dp_shard { layers.{0..10} = unit, root = unit }", "000000000001"),
    ],
)
def test_blocks_named_by_a_rule_have_another_class(body: str, expected: str):
    assert classes(body) == expected


THEIRS = """\
plan theirs

model     python("support.models.factories:{factory}, depth = {depth})
cluster   cpu(devices = 1)
batch     (global = 4, micro = 1, seq_len = 32)
optimizer adamw(lr = 1e-3)
"""


def classes_of(factory: str, depth: int) -> dict[str, str]:
    found = lowered(THEIRS.format(factory=factory, depth=depth)).block_classes
    return {path: "".join(map(str, of_block)) for path, of_block in found if of_block}


@pytest.mark.parametrize(
    "way", slow_but(["one by one", "residual outside", "first input added", "parts", "each called twice"], "one by one")
)
def test_blocks_that_forward_treats_alike_share_a_class(way: str):
    assert classes_of(f'build_passing", way = "{way}"', 10) == {"blocks": "0" * 10}


def test_blocks_that_forward_treats_in_turn_have_a_class_for_each_turn():
    assert classes_of('build_passing", way = "every second in a residual"', 10) == {"blocks": "01" * 5}


APART = (
    "step before one", "skips", "beside each other", "one called twice", "last not called", "result of one",
    "results of all", "list passed twice",
)  # fmt: skip


@pytest.mark.parametrize("way", slow_but(APART, "one called twice", "last not called"))
def test_blocks_that_forward_treats_apart_have_no_classes(way: str):
    # Half as many blocks would repeat with a period, but for the one in the middle.
    assert classes_of(f'build_passing", way = "{way}"', 20) == {}


def test_blocks_of_a_model_that_cannot_be_followed_have_no_classes():
    assert classes_of('build_unfollowed"', 10) == {}


@pytest.mark.parametrize(
    "body",
    [
        UNITS.format("comm { layers.* = bucket(group) }"),
        "fsdp on dp_shard { layers.{1..11} = unit, root = unit }\ncomm (prefetch = units(1, 1))",
    ],
)
def test_shared_buckets_and_explicit_prefetch_give_no_classes(body: str):
    assert lowered(PLAN.format(mesh="dp_shard = 2", body=body)).block_classes == ()
