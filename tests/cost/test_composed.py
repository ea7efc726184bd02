"""Composed estimates against whole simulation: to the byte in memory, and to rounding in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.cost.estimate import estimate
from legoai.cost.search.evaluation.evaluator import Figures
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from support.simulation.simulator import in_the_simulator

HEAD = """\
plan test
model llama3("1b", n_layers = {layers}, tie_embeddings = false)
cluster h100_sxm(hosts = {hosts}, fabric = infiniband_ndr)
attention flash
"""
WAYS = {
    "sharded": (
        12, 1,
        "batch (global = 64, micro = 1, seq_len = 2048)\nmesh (dp_shard = 8)\nfsdp blocks on dp_shard\n",
    ),
    "last layers gathered beside the last block but one": (
        12, 1,
        "batch (global = 64, micro = 2, seq_len = 8192)\nmesh (dp_shard = 8)\nfsdp on dp_shard {\n"
        "  layers.* = unit(reshard = after_backward)\n  {norm, output} = unit\n  root = unit\n}\n",
    ),
    "kept gathered": (
        25, 1,
        "batch (global = 104, micro = 1, seq_len = 4096)\nmesh (dp_shard = 8)\n"
        "fsdp blocks on dp_shard { layers.* = unit(reshard = never) }\ncheckpoint { layers.* = full }\n",
    ),
    "over hosts": (
        24, 4,
        "batch (global = 128, micro = 4, seq_len = 8192)\nmesh (dp_shard = 4, tp = 8)\n"
        "shard standard on tp (sequence)\nfsdp blocks on dp_shard\ncheckpoint { layers.* = every(2) }\n",
    ),
    "groups over a part of a host": (
        24, 3,
        "batch (global = 96, micro = 1, seq_len = 2048)\nmesh (dp_replicate = 4, dp_shard = 6)\n"
        "fsdp blocks on dp_replicate, dp_shard\n",
    ),
    "reduced once": (
        24, 1,
        "batch (global = 96, micro = 1, seq_len = 4096)\nmesh (dp_shard = 8)\nfsdp blocks on dp_shard\n"
        "comm (reduce = last_micro_batch)\ncheckpoint { layers.* = selective([attention, matmul]) }\n",
    ),
    "two treatments": (
        24, 1,
        "batch (global = 128, micro = 2, seq_len = 4096)\nmesh (dp_shard = 8)\nfsdp blocks on dp_shard\n"
        "checkpoint { layers.* = first(9, selective([attention, matmul]), others = full) }\n",
    ),
}  # fmt: skip


SLOW = ("sharded", "groups over a part of a host", "two treatments", "kept gathered", "over hosts", "reduced once")


def both(way: str) -> tuple[Figures, Figures]:
    layers, hosts, body = WAYS[way]
    linted = lint(HEAD.format(layers=layers, hosts=hosts) + body, "test.plan", directory=Path())
    analysis = linted.analysis
    assert analysis is not None, linted.diagnostics
    program, plan, manifest = lower(analysis), analysis.plan, analysis.manifest
    whole, few = (estimate(program, plan, manifest, whole=whole) for whole in (True, False))
    return Figures.of(whole, analysis), Figures.of(few, analysis)


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] if way in SLOW else []) for way in WAYS])
def test_replayed_estimate_equals_full_simulation(way: str):
    whole, few = in_the_simulator(both, way)
    assert whole.whole
    assert not few.whole
    for name in ("peak_memory bytes", "reserved_memory bytes"):
        assert few.metrics[name] == whole.metrics[name]
    assert few.fits == whole.fits
    for name, value in whole.metrics.items():
        assert few.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-9), name
    assert few.compute == pytest.approx(whole.compute, rel=1e-4)
    assert few.recompute == pytest.approx(whole.recompute, rel=1e-4)
    assert few.exposed == pytest.approx(whole.exposed, rel=1e-3, abs=1e-6)
    assert few.micro_batch.computed == pytest.approx(whole.micro_batch.computed)
    assert few.micro_batch.activations == whole.micro_batch.activations


HOST_BOUND = """\
plan test
model llama3("1b", n_layers = 24)
cluster h100_sxm(devices = {devices})
batch (global = {batch}, micro = 1, seq_len = {length})
{body}"""


def seconds(devices: int, batch: int, length: int, body: str) -> tuple[float, float]:
    text = HOST_BOUND.format(devices=devices, batch=batch, length=length, body=body)
    analysis = lint(text, "test.plan", directory=Path()).analysis
    assert analysis is not None
    program, manifest = lower(analysis), analysis.manifest
    assert manifest is not None
    whole, few = (estimate(program, analysis.plan, manifest, whole=whole) for whole in (True, False))
    return whole.step_time, few.step_time


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "batch", "length", "body"),
    [
        (1, 4, 64, ""),
        (1, 4, 512, ""),
        (1, 4, 2048, ""),
        (8, 8, 1024, "mesh (dp_shard = 8)\nfsdp blocks on dp_shard\n"),
    ],
)
def test_replayed_host_bound_step_equals_full_simulation(devices: int, batch: int, length: int, body: str):
    """Over a few blocks the device works off its backlog; over all blocks it runs at the host's pace."""
    whole, few = in_the_simulator(seconds, devices, batch, length, body)
    assert few == pytest.approx(whole, rel=1e-6)
