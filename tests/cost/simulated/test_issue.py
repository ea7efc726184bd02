"""Issuers of operations: Python while autograd runs, or the nodes of autograd themselves."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from legoai.cost import capture as capturing
from legoai.cost.replay.piece import Piece
from legoai.cost.trace.records import Collective, Copy, Kernel
from legoai.cost.trace.trace import Trace
from legoai.lowering.program import Program
from legoai.specs.cluster import device
from support.simulation.simulator import in_the_simulator
from support.texts.plans import lowered

PLAN = """\
plan issue
model   {model}, n_layers = {layers}, dim = 64, n_heads = 4, n_kv_heads = 2, hidden_dim = 96, vocab_size = 64)
cluster h100_sxm(devices = 4)
batch   (global = 10, micro = 1, seq_len = 32)
mesh    (dp_shard = 2, tp = 2)
shard on tp {{
  layers.*.attention.{{wq, wk, wv}} = colwise
  layers.*.attention.wo           = rowwise
  layers.*.feed_forward.{{w1, w3}}  = colwise
  layers.*.feed_forward.w2        = rowwise
}}
fsdp on dp_shard {{ layers.* = unit, root = unit(reshard = never) }}
{more}
optimizer adamw(lr = 1e-3)
"""
BUILT_IN = 'llama3("8b"'
IN_PYTHON = 'python("benchmarks.validation.models:llama_with_swiglu_in_one_kernel", preset = "8b"'
"""A model whose SwiGLU is a Python autograd function."""


def program(model: str, more: str = "", layers: int = 2) -> Program:
    return lowered(PLAN.format(model=model, more=more, layers=layers))


@pytest.fixture(scope="module")
def step():
    """`step(model, more)` are the records of a step that take the host's time."""
    kept: dict[tuple[str, str], list] = {}

    def of(model: str, more: str = "") -> list:
        if (model, more) not in kept:
            trace = in_the_simulator(_captured, program(model, more))
            span = trace.steps[-1]
            records = trace.records[span.start : span.stop]
            kept[model, more] = [one for one in records if isinstance(one, Kernel | Collective | Copy)]
        return kept[model, more]

    return of


def _captured(one: Program) -> Trace:
    return capturing.capture(one, world=4, gpu=device("h100_sxm"))


def issued(records: Iterable, phase: str, op: str) -> set[str]:
    return {one.issuer for one in records if isinstance(one, Kernel) and one.phase == phase and one.op == op}


@pytest.mark.slow
def test_python_function_backward_is_issued_by_python(step):
    records = [one for one in step(IN_PYTHON) if one.module.endswith("feed_forward")]
    assert issued(records, "backward", "aten.silu_backward") == issued(records, "backward", "aten.silu") == {"function"}
    products = [one for one in step(IN_PYTHON) if "feed_forward.w" in one.module]
    assert issued(products, "backward", "aten.mm") == {"node"}
    assert issued(step(BUILT_IN), "backward", "aten.silu_backward") == {"node"}


def test_backward_hooks_and_collectives_are_issued_by_python(step):
    records = step(BUILT_IN)
    assert issued(records, "backward", "fsdp.chunk_cat") == {"python"}  # of FSDP's hook behind the backward of a unit
    assert {one.issuer for one in records if isinstance(one, Collective)} == {"python"}
    found = {(one.phase, one.axis) for one in records if isinstance(one, Collective) and one.phase != "optimizer"}
    assert found == {(phase, axis) for phase in ("forward", "backward") for axis in ("dp_shard", "tp")}


def test_forward_recomputation_and_optimizer_are_issued_by_python(step):
    records = step(BUILT_IN, "checkpoint { layers.* = full }")
    assert {one.issuer for one in records if one.phase in ("forward", "recompute", "optimizer")} == {"python"}
    assert {"forward", "recompute", "optimizer", "backward"} == {one.phase for one in records} - {"other"}


@pytest.mark.slow
def test_compiled_graph_issues_its_kernels_in_both_passes(step):
    records = step(BUILT_IN, "compile { layers.* = inductor }")
    fused = [one for one in records if isinstance(one, Kernel) and one.op.startswith("fused(")]
    assert {(one.phase, one.issuer) for one in fused} == {("forward", "node"), ("backward", "node")}
    inside = [one for one in records if isinstance(one, Collective) and one.axis == "tp"]
    assert {one.issuer for one in inside} == {"node"}
    assert {one.issuer for one in records if isinstance(one, Collective) and one.axis == "dp_shard"} == {"python"}


def _composed(short: Program, whole: Program) -> tuple[bool, bool]:
    piece = capturing.capture_piece(short, world=4)
    assert isinstance(piece, Piece)
    found = piece.trace({"layers": 9}, 5)
    return bool(piece.containers), found == capturing.capture(whole, world=4, replay=False)


@pytest.mark.slow
def test_replayed_blocks_have_the_issuers_of_full_capture():
    one = program(IN_PYTHON, layers=9)
    assert in_the_simulator(_composed, one, one) == (True, True)
