"""Lower bounds never exceed the full simulation of a candidate."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest

from legoai.cost.estimate import estimate
from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.lower_bounds.communication import collectives
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan
from legoai.lowering.program import lower
from support.simulation.bounded_candidates import bounded_wrongly
from support.simulation.simulator import in_the_simulator

HEADS = {
    "cpu": 'model llama3("tiny", n_layers = 2)\ncluster cpu(devices = 4)\nprecision (param = fp32, reduce = fp32)\n',
    "h100": (
        'model llama3("1b", n_layers = 4, tie_embeddings = false)\ncluster h100_sxm(devices = 4)\nattention flash\n'
    ),
    "gpt2": 'model gpt2("small", n_layers = 2)\ncluster a100_sxm80(devices = 4)\n',
    "mixtral": (
        'model mixtral("8x7b", n_layers = 2, dim = 1024, n_heads = 8, hidden_dim = 2048)\n'
        "cluster h100_sxm(devices = 4)\nattention flash\n"
    ),
    "deepseek": (
        'model deepseek("v2_lite", n_layers = 3, n_experts = 8, dim = 1024, dense_hidden_dim = 2048)\n'
        "cluster h100_sxm(devices = 4)\n"
    ),
    "three hosts": (
        'model llama3("1b", n_layers = 4, dim = 1536, n_heads = 12, n_kv_heads = 6, tie_embeddings = false)\n'
        "cluster h100_sxm(hosts = 3, devices = 4, fabric = infiniband_ndr)\nattention flash\n"
    ),
}
SHARDED = """\
batch (global = 16, micro = auto in [1, 2, 4], seq_len = {length})
mesh (dp_shard = rest, tp = auto)
shard standard on tp
fsdp blocks on dp_shard {{ layers.* = unit(reshard = auto in [after_forward, never]) }}
checkpoint {{ layers.* = auto in [none, full, every(2), selective([attention, matmul])] }}
loss auto in [eager, fused, chunked(4), chunked(4, last_layer = true)]
"""
EXPERTS = """\
batch (global = 16, micro = auto in [1, 2, 4], seq_len = {length})
mesh (dp_shard = rest, ep = auto in [1, 2, 4])
shard standard on ep
fsdp blocks on dp_shard {{ layers.* = unit(reshard = auto in [after_forward, after_backward]) }}
checkpoint {{ layers.* = auto in [none, full, every(2), selective([attention, matmul])] }}
loss auto in [eager, chunked(4)]
"""
ACROSS_TP = EXPERTS.replace("dp_shard = rest", "dp_shard = rest, tp = 2").replace(
    "shard standard on ep", "shard standard on tp (sequence, across_tp)\nshard standard on ep (across_tp)"
)
COMPILED = """\
batch (global = 16, micro = auto in [1, 2, 4], seq_len = {length})
mesh (dp_shard = rest, tp = auto in [1, 2])
shard standard on tp (sequence)
fsdp blocks on dp_shard {{ layers.* = unit(reshard = auto in [after_forward, never]) }}
comm (prefetch = auto in [implicit, units(2, 2)])
compile {{ layers.* = inductor }}
checkpoint {{
  layers.* = auto in [none, full, every(2), selective([attention]), selective([attention, matmul]), budget(50%)]
}}
"""
TWO_WAYS = """\
batch (global = 16, micro = auto in [1, 2], seq_len = {length})
mesh (dp_replicate = auto in [1, 2], dp_shard = rest, cp = auto in [1, 2], tp = auto in [1, 2])
shard standard on tp (sequence)
context on cp (rotate = auto in [allgather, alltoall])
fsdp blocks on dp_shard {{ layers.* = unit(reshard = auto in [after_forward, never]) }}
checkpoint {{ layers.* = auto in [none, full] }}
"""
DIVIDED = """\
batch (global = 16, micro = auto in [1, 2], seq_len = {length})
mesh (dp_shard = rest)
fsdp on dp_shard {{ layers.* = auto in [unit, first(1, unit, others = unit(reshard = never))], root = unit }}
checkpoint {{
  layers.* = auto in [none, full, first(1, full), first(1, full, others = selective([attention]))]
}}
offload (optimizer = auto in [none, all])
"""
PIPELINED = """\
batch (global = 16, micro = auto in [1, 2], seq_len = {length})
mesh (pp = auto in [1, 2], dp_shard = rest)
fsdp blocks on dp_shard {{ layers.* = unit(reshard = after_backward) }}
pipeline on pp (
  schedule = auto in [GPipe, 1F1B, Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble]
  split = auto in [even, even(loss = 1), [1, 3], [3, 1]]
)
checkpoint {{ layers.* = auto in [none, full] }}
"""
CUT_AND_PIPELINED = """\
batch (global = 16, micro = auto in [1, 2], seq_len = {length})
mesh (pp = auto in [1, 2], dp_shard = rest, tp = auto in [1, 2])
shard standard on tp (sequence, loss_parallel)
fsdp blocks on dp_shard {{ layers.* = unit(reshard = auto in [after_forward, after_backward]) }}
pipeline on pp (schedule = auto in [1F1B, Interleaved1F1B], stages = auto in [2, 4])
checkpoint {{ layers.* = auto in [none, full, selective([attention]), selective([attention, matmul])] }}
precision (reduce = auto in [bf16, fp32])
"""
HIDDEN_IN_BACKWARD = """\
batch (global = 16, micro = auto in [1, 2], seq_len = {length})
mesh (dp_shard = rest, tp = auto in [1, 2, 4])
shard standard on tp (sequence, loss_parallel) {{
  layers.*.{{attention, feed_forward}} = inputs(from = shard(1), to = replicate, overlap = auto in [backward, none])
  output                             = colwise(input = shard(1), overlap = backward, loss_parallel = true)
}}
fsdp blocks on dp_shard {{ layers.* = unit(reshard = auto in [after_forward, never]) }}
checkpoint {{ layers.* = auto in [none, full, selective([attention, matmul])] }}
"""

OVER_PARTS_OF_HOSTS = """\
batch (global = 48, micro = auto in [1, 2], seq_len = {length})
mesh (pp = auto in [1, 2, 4], dp_replicate = auto in [1, 2], dp_shard = rest, tp = auto in [1, 3])
shard standard on tp
fsdp blocks on dp_replicate, dp_shard {{ layers.* = unit(reshard = auto in [after_forward, after_backward]) }}
pipeline on pp (schedule = auto in [1F1B, Interleaved1F1B])
checkpoint {{ layers.* = auto in [none, full] }}
"""


def drawn(head: str, body: str, count: int, seed: int) -> list[str]:
    """Return drawn candidates whose bounds exceed their simulation."""
    text = f"plan test\n{HEADS[head]}{body.format(length=256 if head == 'cpu' else 1024)}"
    return bounded_wrongly(text, Path(), count, seed)


@pytest.mark.parametrize(
    ("head", "body"),
    [
        *(pytest.param(head, SHARDED, marks=pytest.mark.slow) for head in ("cpu", "h100")),
        pytest.param("h100", PIPELINED, marks=pytest.mark.slow),
        pytest.param("h100", HIDDEN_IN_BACKWARD, marks=pytest.mark.slow),
        pytest.param("mixtral", EXPERTS, marks=pytest.mark.slow),
        ("three hosts", OVER_PARTS_OF_HOSTS),
    ],
)
def test_bounds_are_below_the_simulation(head: str, body: str):
    body = body.replace("fused, ", "")  # whose compilation takes seconds
    assert in_the_simulator(drawn, head, body, 2, 1) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("head", "body"),
    [
        *itertools.product(("cpu", "h100", "gpt2"), (SHARDED, PIPELINED)),
        *itertools.product(("mixtral", "deepseek"), (EXPERTS, ACROSS_TP, PIPELINED)),
        ("deepseek", SHARDED),
        ("h100", DIVIDED),
        ("h100", TWO_WAYS),
        *itertools.product(("h100", "gpt2", "mixtral"), (COMPILED,)),
        ("h100", CUT_AND_PIPELINED),
        ("h100", HIDDEN_IN_BACKWARD),
        ("three hosts", OVER_PARTS_OF_HOSTS),
    ],
)
def test_bounds_are_below_the_simulation_of_many_candidates(head: str, body: str, seed: int):
    assert in_the_simulator(drawn, head, body, 20, 100 + seed) == []


@pytest.mark.parametrize("body", [SHARDED, COMPILED, COMPILED.replace("inductor", "auto in [none, inductor]")])
def test_partial_answer_bounds_are_below_completion_bounds(body: str):
    text = f"plan test\n{HEADS['h100']}{body.format(length=1024)}"
    plan, bounds = OpenPlan(lint(text, "test.plan", directory=Path()), directory=Path()), BoundsOf()
    draw = random.Random(3)
    for _ in range(40):
        whole = [draw.randrange(len(hole.choices)) for hole in plan.holes]
        candidate = plan.candidate(whole)
        if candidate.errors:
            continue
        partial = plan.candidate([None if draw.random() < 0.5 else index for index in whole])
        first, second = bounds(partial.analysis), bounds(candidate.analysis)
        assert first.step_time <= second.step_time
        assert first.memory <= second.memory


def test_open_attention_kernel_has_the_bound_of_the_fastest():
    text = f"plan test\n{HEADS['h100']}{SHARDED.format(length=4096)}".replace("attention flash", "attention KERNEL")
    found = {}
    for kernel in ("auto", "auto in [efficient, math]", "default", "flash", "efficient", "cudnn", "math"):
        written = text.replace("KERNEL", kernel)
        plan = OpenPlan(lint(written, "test.plan", directory=Path()), directory=Path())
        choices = [None if hole.what == "attention kernel" else 0 for hole in plan.holes]
        found[kernel] = BoundsOf()(plan.candidate(choices).analysis)
    listed = [found[kernel] for kernel in ("default", "flash", "efficient", "cudnn", "math")]
    assert 0.0 < found["auto"].step_time == min(item.step_time for item in listed)
    assert 0.0 < found["auto"].memory == min(item.memory for item in listed)
    few = found["auto in [efficient, math]"]
    assert few.step_time == min(found["efficient"].step_time, found["math"].step_time) >= found["auto"].step_time


COMPILED_BLOCKS = f"""\
plan test
{HEADS["h100"]}batch (global = 16, micro = 4, seq_len = 2048)
mesh (dp_shard = 4)
fsdp blocks on dp_shard
compile {{ layers.* = inductor }}
"""


def bounds_of_compiled(treatment: str) -> tuple[float, float]:
    linted = lint(f"{COMPILED_BLOCKS}checkpoint {{ layers.* = {treatment} }}\n", "test.plan", directory=Path())
    analysis = linted.analysis
    assert analysis is not None
    least, found = BoundsOf()(analysis), estimate(lower(analysis), analysis.plan, analysis.manifest)
    return least.step_time / found.step_time, least.memory / found.peak_active


@pytest.mark.slow
@pytest.mark.parametrize(
    ("treatment", "time", "memory"), [("none", 0.8, 0.7), ("full", 0.75, 0.5), ("selective([attention])", 0.75, 0.5)]
)
def test_bounds_of_compiled_blocks_are_near_the_simulation(treatment: str, time: float, memory: float):
    found = in_the_simulator(bounds_of_compiled, treatment)
    assert time < found[0] <= 1.0
    assert memory < found[1] <= 1.0


OVER_HOSTS = """\
plan test
model llama3("70b", n_layers = 6)
cluster h100_sxm(hosts = 4, fabric = infiniband_ndr)
batch (global = 32, micro = 1, seq_len = 1024)
mesh (dp_shard = 4, tp = 8)
shard standard on tp (sequence)
fsdp blocks on dp_shard
attention flash
"""


def bounds_over_hosts() -> tuple[float, float, float, float, float]:
    linted = lint(OVER_HOSTS, "test.plan", directory=Path())
    analysis = linted.analysis
    assert analysis is not None
    bounds = BoundsOf()
    found = estimate(lower(analysis), analysis.plan, analysis.manifest)
    least, machine = bounds(analysis), bounds.machine(analysis)
    parameters = collectives.of_parameters(analysis, machine, math.inf)
    return least.step_time, parameters, found.step_time, least.memory, found.peak_active


def test_step_over_hosts_is_bounded_by_parameter_traffic():
    least, travels, step, memory, peak = in_the_simulator(bounds_over_hosts)
    assert 0.7 * step < travels <= least <= step
    assert 0.25 * peak < memory <= peak
