"""Host memory of offloaded state is what the devices hold where nothing is offloaded."""

from __future__ import annotations

import functools

import pytest

from support.simulation.reports import everything
from support.simulation.simulator import in_the_simulator

PLAN = """\
plan offloaded
model   llama3("tiny", n_layers = 2)
cluster h100_sxm({cluster})
batch   (global = 16, micro = 1, seq_len = 64)
mesh    ({mesh})
fsdp blocks on dp_shard
{body}
"""
KINDS = ("parameter", "gradient", "optimizer_state")


def reported(body: str, mesh: str = "dp_shard = 4", cluster: str = "devices = 4") -> dict:
    return in_the_simulator(everything, PLAN.format(body=body, mesh=mesh, cluster=cluster))


@functools.cache
def held_on_devices() -> dict[str, float]:
    found = reported("")["document"]["memory"]
    assert found["host_bytes"] is None
    sharded = found["by_category"]["sharded_parameter"]  # gradients are as large, but not all there at the peak
    return {"parameter": sharded, "gradient": sharded, "optimizer_state": found["by_category"]["optimizer_state"]}


@pytest.mark.parametrize(
    ("body", "kinds"),
    [
        pytest.param("offload (parameters = all)", KINDS, marks=pytest.mark.slow),
        ("offload (optimizer = all)", ("optimizer_state",)),
        ("offload (activations = all)", ()),
    ],
)
def test_host_holds_what_leaves_the_devices(body: str, kinds: tuple[str, ...]):
    expected, found = held_on_devices(), reported(body)
    host = found["document"]["memory"]["host_bytes"]
    of_activations = "host memory does not count offloaded activations"
    assert (of_activations in found["document"]["assumptions"]) is (not kinds)
    if not kinds:
        assert host is None
        assert "offloaded to host memory" not in found["terminal"]
        return
    # Devices round each tensor up to 512 bytes.
    assert {kind: host[kind] for kind in kinds} == pytest.approx({kind: expected[kind] for kind in kinds}, rel=0.02)
    assert all(host[kind] == 0 for kind in KINDS if kind not in kinds)
    assert host["rank"] == sum(host[kind] for kind in KINDS)
    assert host["host"] == 4 * host["rank"]
    assert "offloaded to host memory" in found["terminal"]
    assert "Offloaded to host memory: " in found["page"]


@pytest.mark.parametrize(("amount", "least"), [(100_000, 90_000), pytest.param(511, None, marks=pytest.mark.slow)])
def test_an_amount_counts_the_parameters_whose_state_fits(amount: int, least: int | None):
    plan = PLAN.replace("on dp_shard", "on dp_shard (backend = graph)")
    body = f"offload (optimizer = bytes({amount}B))"
    found = in_the_simulator(everything, plan.format(body=body, mesh="dp_shard = 4", cluster="devices = 4"))
    host = found["document"]["memory"]["host_bytes"]
    assert (host is None) if least is None else (least < host["optimizer_state"] < amount)


def test_several_hosts_share_the_state():
    one = reported("offload (parameters = all)", "dp_shard = 8", "devices = 8")
    two = reported("offload (parameters = all)", "dp_shard = 16", "hosts = 2, fabric = infiniband_ndr")
    held, halves = (found["document"]["memory"]["host_bytes"]["host"] for found in (one, two))
    assert 2 * halves == pytest.approx(held, rel=1e-4)
