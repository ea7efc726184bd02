"""Host time of kernels by their issuer, measured on this processor."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time

import pytest
import torch
from torch import nn

from legoai.cost.calibration.host import SMALL, HostTimer, chain, issue_constants
from legoai.cost.calibration.observed.kernels import KernelTimes
from legoai.cost.calibration.update import _host_parts
from legoai.cost.timing.timeline import Host
from legoai.cost.trace.garbage import uncollected
from legoai.specs.models.families import resolve_config
from legoai.specs.models.gpt import GPT


@pytest.mark.slow
def test_host_constants_match_the_machine_fields() -> None:
    constants = issue_constants("cpu")
    assert set(constants) == {
        "python_seconds", "dispatch_seconds", "function_seconds", "recompute_seconds", "policy_seconds",
        "policy_recompute_seconds",
    }  # fmt: skip
    assert all(1e-7 < one["value"] < 1e-2 for one in constants.values())
    assert set(constants) <= {field.name for field in dataclasses.fields(Host)}


def test_python_function_costs_more_host_time_than_a_node() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    class Functions(nn.Module):
        def forward(self, x):
            return Double.apply(x)

    class Nodes(nn.Module):
        def forward(self, x):
            return x * 2

    timer, x = HostTimer(clock=time.process_time), torch.ones(4, requires_grad=True)
    measures = {
        "nodes": lambda: timer.backward(chain(Nodes), x),
        "functions": lambda: timer.backward(chain(Functions), x),
        "decoding": lambda: timer.forward(chain(Nodes), x, records=False),
        "forward": lambda: timer.forward(chain(Nodes), x, records=True),
    }
    with uncollected():
        rounds = [{name: measure() for name, measure in measures.items()} for _ in range(9)]
    # A processor's speed may change between two measurements, which concerns few rounds.
    assert statistics.median(one["functions"] / one["nodes"] for one in rounds) > 1.2
    assert statistics.median(one["forward"] / one["decoding"] for one in rounds) > 1.0


@pytest.mark.slow
def test_recomputation_costs_more_host_time_than_forward() -> None:
    timer, tokens = HostTimer(clock=time.process_time), torch.zeros(1, SMALL["max_seq_len"], dtype=torch.int64)
    decoder = GPT(resolve_config("gpt3", "1.3b", SMALL))
    with uncollected():
        again = [timer.recomputation(decoder, tokens) / timer.forward(decoder, tokens) for _ in range(3)]
    assert statistics.median(again) > 2.0
    assert set(decoder.layers) == {str(number) for number in range(SMALL["n_layers"])}
    assert not any("block" in name for name, _ in decoder.named_modules()), "the decoder itself is unchanged"


def test_result_is_released_outside_of_the_timed_region() -> None:
    order: list[str] = []

    class Result:
        def __del__(self) -> None:
            order.append("released")

    def clock() -> float:
        order.append("clock")
        return float(len(order))

    timer = HostTimer(clock=clock, settle=lambda: order.append("settled"))
    assert timer._once(None, lambda _: Result()) == pytest.approx(1.0)
    assert order == ["settled", "clock", "clock", "released"]


@pytest.mark.parametrize(("budget", "repetitions"), [(0.0, 5), (19.0, 10), (math.inf, 60)])
def test_repetitions_end_with_the_budget(budget: float, repetitions: int) -> None:
    runs: list[None] = []
    assert HostTimer(clock=lambda: 2.0 * len(runs), budget=budget).least(lambda: None, runs.append) == 2.0
    assert len(runs) == repetitions


def test_function_time_is_limited_by_observed_module_time() -> None:
    constants = {
        name: {"value": value, "source": "base"}
        for name, value in (
            ("python_seconds", 3e-5), ("dispatch_seconds", 2e-5), ("function_seconds", 6e-5),
            ("recompute_seconds", 9e-5),
        )
    }  # fmt: skip
    for typical, expected in ((1e-5, 2e-5), (4e-5, 6e-5)):
        document = {"constants": dict(constants)}
        found = KernelTimes()
        found.host["python"] = [typical] * 40
        list(_host_parts(document, found, on_device=True))
        assert document["constants"]["function_seconds"]["value"] == pytest.approx(expected)
        assert document["constants"]["recompute_seconds"]["value"] == pytest.approx(1.5 * expected)
        assert document["constants"]["dispatch_seconds"] is constants["dispatch_seconds"]
