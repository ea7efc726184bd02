"""A model whose first blocks have no experts has the trace of the whole model, and its time and memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.cost import capture as capturing
from legoai.cost.estimate import Estimate, estimate
from legoai.cost.replay.file import load, save
from legoai.cost.replay.piece import Piece
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from legoai.specs.cluster import device
from support.simulation.simulator import in_the_simulator
from support.texts.plans import lowered

PLAN = """\
plan deep
model deepseek("tiny", n_layers = 9, n_dense_layers = {dense})
cluster h100_sxm(devices = 8)
batch (global = 12, micro = 1, seq_len = 128)
{body}
shard standard on ep
fsdp blocks on dp_shard
"""
BODIES = {
    "experts": "mesh (dp_shard = 4, ep = 4)\ncheckpoint { layers.* = full }",
    "tensor parallel": "mesh (dp_shard = 4, tp = 2, ep = 2)\nshard standard on tp (sequence, loss_parallel)",
}


def text_of(name: str, dense: int) -> tuple[str, int]:
    """Return the plan, and its ranks."""
    world = 4 if name == "experts" else 8
    return PLAN.format(dense=dense, body=BODIES[name]).replace("devices = 8", f"devices = {world}"), world


def composed(name: str, dense: int) -> tuple[list[str], bool]:
    text, world = text_of(name, dense)
    program, gpu = lowered(text), device("h100_sxm")
    piece = capturing.capture_piece(program, world=world, kind="cuda", gpu=gpu)
    assert isinstance(piece, Piece)
    whole = capturing.capture(program, world=world, kind="cuda", gpu=gpu, replay=False)
    return [one.key for one in piece.containers], load(save(piece)).trace() == piece.trace() == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dense"),
    [("experts", 3), ("tensor parallel", 1), ("tensor parallel", 3)],
)
def test_blocks_with_experts_are_repeated_behind_dense_ones(name: str, dense: int):
    assert in_the_simulator(composed, name, dense) == ([f"layers[{dense}..8]"], True)


def both_ways() -> tuple[Estimate, Estimate]:
    linted = lint(text_of("experts", 3)[0], "deep.plan", directory=Path())
    assert linted.analysis is not None and linted.analysis.manifest is not None
    program, plan = lower(linted.analysis), linted.analysis.plan
    return tuple(estimate(program, plan, linted.analysis.manifest, whole=whole) for whole in (True, False))


@pytest.mark.slow
def test_few_blocks_have_the_time_and_memory_of_all():
    whole, few = in_the_simulator(both_ways)
    assert whole.whole and not few.whole
    assert few.step_time == pytest.approx(whole.step_time, rel=1e-6)
    assert few.metric("peak_memory", "bytes") == whole.metric("peak_memory", "bytes")
    assert few.metric("mfu", "fraction") == pytest.approx(whole.metric("mfu", "fraction"), rel=1e-6)
