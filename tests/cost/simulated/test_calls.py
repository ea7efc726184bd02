"""Calls of the host beside operations: of DTensor, FSDP and Python autograd functions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from legoai.cost import capture as capturing
from legoai.cost.machine.cluster import machine_of
from legoai.cost.machine.op_costs import OpCosts
from legoai.cost.replay.piece import Piece
from legoai.cost.timing.timeline import Host, call_constant
from legoai.cost.trace.records import CALLS, EACH, Collective, Copy, Kernel, TensorType
from legoai.specs.cluster import device
from legoai.specs.directives.cluster import ClusterUse
from support.simulation.simulator import in_the_simulator
from support.texts.plans import lowered

PLAN = """\
plan calls
model   llama3("8b", n_layers = {layers}, dim = 64, n_heads = 4, n_kv_heads = 2, hidden_dim = 96, vocab_size = 64)
cluster h100_sxm(devices = 4)
batch   (global = {batch}, micro = 1, seq_len = 32)
{parallel}
optimizer adamw(lr = 1e-3)
clip    (norm = 1.0)
"""
UNITS = "mesh (dp_shard = 4)\nfsdp on dp_shard { layers.* = unit, root = unit }"
TENSOR_PARALLEL = """\
mesh (dp_shard = 2, tp = 2)
shard standard on tp
fsdp on dp_shard { layers.* = unit, root = unit }"""


def program(parallel: str, layers: int = 3, batch: int = 4):
    return lowered(PLAN.format(parallel=parallel, layers=layers, batch=batch))


def _records(parallel: str) -> list[Kernel | Collective | Copy]:
    trace = capturing.capture(program(parallel), world=4, gpu=device("h100_sxm"))
    span = trace.steps[-1]
    return [one for one in trace.records[span.start : span.stop] if isinstance(one, Kernel | Collective | Copy)]


@pytest.fixture(scope="module")
def calls():
    """`calls(parallel, phase, module)` are the numbers of calls before the operations there."""
    kept: dict[str, list[Kernel | Collective | Copy]] = {}

    def of(parallel: str, phase: str, module: str = "") -> Counter:
        if parallel not in kept:
            kept[parallel] = in_the_simulator(_records, parallel)
        found: Counter = Counter()
        for one in kept[parallel]:
            if one.phase == phase and one.module.startswith(module):
                found.update(dict(one.calls))
        return found

    return of


def test_units_gather_and_reduce_their_parameters(calls):
    forward, backward = calls(UNITS, "forward"), calls(UNITS, "backward")
    assert forward == {"unit": 3, "gather": 4, "gathered parameter": 4 * EACH}
    # The last block's parameters are gathered still. Every unit reduces its gradients, the root too.
    assert backward["gather"] in (2, 3) and backward["reduction"] == 4
    assert backward["reduced parameter"] == 4 * EACH
    assert calls(UNITS, "optimizer") == {"conversion": EACH, "listed dtensor": EACH}


@pytest.mark.slow
def test_products_of_tensor_parallel_layers_are_operators_on_dtensors(calls):
    forward = calls(TENSOR_PARALLEL, "forward", "layers.1")
    assert forward["dtensor"] >= 7, "seven linear layers"
    assert forward["conversion"] >= 2 * 7
    records = [one for one in in_the_simulator(_records, TENSOR_PARALLEL) if one.module.startswith("layers.1")]
    collectives = [
        one for one in records if isinstance(one, Collective) and one.phase == "forward" and one.axis == "tp"
    ]
    assert forward["functional collective"] == len(collectives) > 0
    assert calls(TENSOR_PARALLEL, "backward", "layers.1")["conversion backward"] >= 2 * 7


@pytest.mark.slow
def test_compiled_blocks_call_nothing(calls):
    compiled = f"{TENSOR_PARALLEL}\ncompile {{ layers.* = inductor }}"
    for phase in ("forward", "backward"):
        inside = calls(compiled, phase, "layers.1")
        assert not inside.keys() & {"conversion", "conversion backward", "functional collective", "function"}
    eager = calls(TENSOR_PARALLEL, "forward")["dtensor"]
    assert calls(compiled, "forward")["dtensor"] < eager / 3


def _composed(parallel: str) -> tuple[bool, bool]:
    batch = 20 if parallel == UNITS else 10
    one = program(parallel, layers=9, batch=batch)
    piece = capturing.capture_piece(one, world=4)
    assert isinstance(piece, Piece)
    return bool(piece.containers), piece.trace({"layers": 9}, 5) == capturing.capture(one, world=4, replay=False)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [UNITS, TENSOR_PARALLEL])
def test_replayed_blocks_make_the_calls_of_full_capture(parallel):
    assert in_the_simulator(_composed, parallel) == (True, True)


def kernel(*calls: tuple[str, int]) -> Kernel:
    types = (TensorType((4096,), "float32"),)
    return Kernel(
        stream=0, op="aten._fused_adamw_", inputs=types * 10, outputs=(), flops=0, bytes_read=163840,
        bytes_written=163840, attributes={}, module="", phase="optimizer", issuer="python", calls=calls,
    )  # fmt: skip


def test_host_takes_time_for_calls():
    called = kernel(("conversion", 3), ("listed dtensor", EACH), ("unit", 1))
    host = Host(dispatch_seconds=1e-5, python_seconds=2e-5, calls={"conversion": 1e-4, "listed dtensor": 1e-6})
    assert host.dispatch(called) == pytest.approx(2e-5 + 3e-4 + 10e-6)


def test_shipped_gpus_have_a_time_for_every_call():
    host = machine_of(ClusterUse(device="h100_sxm", hosts=1), 8, directory=Path()).host()
    assert host.calls.keys() == set(CALLS)
    assert all(0 < seconds < 1e-3 for seconds in host.calls.values())
    assert call_constant("conversion backward") == "conversion_backward_call_seconds"


def test_calls_keep_a_processor_from_computing():
    machine = machine_of(ClusterUse(device="cpu", hosts=1, devices=4), 4, directory=Path())
    called = kernel(("conversion", 2), ("unit", 1))
    calls = machine.calls()
    found, without = (OpCosts(machine=machine)(one).seconds for one in (called, kernel()))
    assert found == pytest.approx(without + 2 * calls["conversion"] + calls["unit"])
    assert machine.host().dispatch(called) == machine.host().dispatch(kernel())
