"""A model that treats single blocks apart has the trace of all of its blocks."""

from __future__ import annotations

import pytest

from legoai.cost import capture as capturing
from legoai.cost.replay.piece import Piece
from legoai.specs.cluster import device
from support.simulation.simulator import in_the_simulator
from support.texts.plans import lowered

PLAN = """\
plan theirs
model python("support.models.factories:build_passing", way = "{way}", depth = 12)
cluster h100_sxm(devices = 2)
batch (global = 4, micro = 1, seq_len = 32)
mesh (dp_shard = 2)
fsdp on dp_shard {{ blocks.* = unit }}
"""


def traced(way: str, statement: str = "") -> tuple[bool, bool]:
    """Return whether blocks were left out, and whether the trace is that of the whole model."""
    program, gpu = lowered(PLAN.format(way=way) + statement), device("h100_sxm")
    piece = capturing.capture_piece(program, world=2, kind="cuda", gpu=gpu)
    whole = capturing.capture(program, world=2, kind="cuda", gpu=gpu, replay=False)
    if isinstance(piece, Piece):
        return bool(piece.containers), piece.trace() == whole
    return False, piece == whole


@pytest.mark.parametrize(
    ("way", "shortened"),
    [
        ("one by one", True),
        pytest.param("each called twice", True, marks=pytest.mark.slow),
        pytest.param("every second in a residual", True, marks=pytest.mark.slow),
        ("skips", False),
        pytest.param("one called twice", False, marks=pytest.mark.slow),
        pytest.param("results of all", False, marks=pytest.mark.slow),
    ],
)
def test_blocks_are_left_out_where_forward_treats_them_alike(way: str, shortened: bool):
    assert in_the_simulator(traced, way) == (shortened, True)


@pytest.mark.parametrize(
    ("statement", "shortened"),
    [
        ("checkpoint { blocks.* = none, blocks.0 = full }", True),
        pytest.param("checkpoint { blocks.* = full, blocks.{10..11} = none }", True, marks=pytest.mark.slow),
        pytest.param("checkpoint { blocks.* = every(2) }", True, marks=pytest.mark.slow),
        pytest.param(
            "checkpoint { blocks.{0..7} = full }\ncomm (prefetch = units(1, 1))", True, marks=pytest.mark.slow
        ),
        pytest.param("compile { blocks.{3..11} = inductor }", True, marks=pytest.mark.slow),
        pytest.param("checkpoint { blocks.{2, 5, 8} = full }", False, marks=pytest.mark.slow),
    ],
)
def test_blocks_of_a_list_are_left_out_of_those_that_the_plan_treats_alike(statement: str, shortened: bool):
    assert in_the_simulator(traced, "one by one", statement) == (shortened, True)
