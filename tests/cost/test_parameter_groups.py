"""The simulated update has a kernel for each group of parameters, as the program has."""

from __future__ import annotations

from collections import Counter

import pytest

from legoai.cost.capture import capture
from legoai.cost.trace.records import Collective, Kernel, WaitWork
from support.simulation.simulator import in_the_simulator
from support.texts.plans import HEAD, lowered

RULES = "{ norm = group(weight_decay = 0), layers.*.*_norm = group(weight_decay = 0), output = group(lr_scale = 0.5) }"
PLAN = f"""\
{HEAD.replace("devices = 4", "devices = 2")}
batch (global = 4, micro = 2, seq_len = 32)
mesh (dp_shard = 2)
fsdp on dp_shard {{ layers.* = unit }}
optimizer adamw(lr = 3e-4, weight_decay = 0.1)"""


MUON = """\
plan muon
model   llama3("tiny")
cluster h100_sxm(devices = 4)
batch   (global = 8, micro = 2, seq_len = 64)
mesh    (dp_shard = 2, tp = 2)
shard standard on tp (sequence)
fsdp on dp_shard { layers.* = unit }
optimizer adamw(lr = 3e-4) { layers.** = muon(lr = 0.02, ns_steps = 2) }
"""


def update_of_muon(text: str) -> tuple[Counter[str], int, int]:
    """Kernels, and the collectives that exchange parts with their bytes, in the update of the second step."""
    trace = capture(lowered(text), world=4)
    span = trace.steps[-1]
    found = trace.records[span.start : span.stop]
    waited = {item.work for item in found if isinstance(item, WaitWork)}
    assert all(item.work in waited for item in found if isinstance(item, Collective) and item.kind == "all_to_all")
    exchanged = [item for item in found if isinstance(item, Collective) and item.kind == "all_to_all"]
    counted = Counter(item.op for item in found if isinstance(item, Kernel))
    return counted, len(exchanged), sum(item.bytes for item in exchanged)


@pytest.mark.slow
def test_muon_step_has_orthogonalization_and_its_collectives():
    one = in_the_simulator(update_of_muon, MUON)
    none = in_the_simulator(update_of_muon, MUON[: MUON.index("optimizer")] + "optimizer adamw(lr = 3e-4)\n")
    products = one[0] - none[0]
    # 4 layers of 7 matrices, of which 4 ranks have a quarter; in each step of two one product and two of addmm.
    assert (products["aten.mm"], products["aten.addmm"]) == (7 * 2, 7 * 4)
    assert one[1] > none[1] == 0
    assert one[2] > 0


def kernels(text: str, *, replay: bool) -> Counter[str]:
    trace = capture(lowered(text), world=2, kind="cpu", replay=replay)
    span = trace.steps[-1]
    return Counter(item.op for item in trace.records[span.start : span.stop] if isinstance(item, Kernel))


@pytest.mark.parametrize("replay", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_each_parameter_group_is_one_update_kernel(replay: bool):
    for rules, groups in (("", 1), (RULES, 4)):
        found = in_the_simulator(kernels, f"{PLAN} {rules}\n", replay=replay)
        assert found["aten._fused_adamw_"] == groups, rules
