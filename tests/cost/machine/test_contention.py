"""Contention: the slowdown of kernels by concurrent collectives."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.cost.kernels.kinds import Attention, Movement, Product, Work
from legoai.cost.machine.cluster import Machine, machine_of
from legoai.cost.machine.contention import (
    beside_collectives,
    memory_of_collective,
    memory_share,
    slowdown_by_collective,
)
from legoai.cost.machine.op_costs import OpCosts
from legoai.cost.profiles import profile
from legoai.cost.timing.timeline import Cost, Host
from legoai.cost.trace.records import Collective
from legoai.specs.directives.cluster import ClusterUse

PRODUCT = Product(batch=1, m=2560, n=27648, k=5120, rate="bf16", bytes=2**28)
MOVEMENT = Movement(kind="elementwise", bytes=2**30)
ATTENTION = Attention(
    batch=1, heads=16, key_heads=16, queries=4096, keys=4096, head_dim=128, value_dim=128, causal=True, backward=False,
    rate="bf16", implementation="flash2", bytes=2**26,
)  # fmt: skip


def gather(size: int, ranks: int = 8) -> Collective:
    return Collective(
        work=1, stream=1, kind="all_gather", ranks=tuple(range(ranks)), axis="dp_shard", bytes=size, dtype="uint8",
        module="", phase="forward",
    )  # fmt: skip


def slowdown(work: Work, name: str, *, channels: int | None = None) -> float:
    """The time of a kernel beside a collective of so many channels, over its time alone."""
    device = profile(name)
    kernel = Cost(seconds=1.0, resource="compute", model="", beside=beside_collectives(work, device))
    collective = Cost(seconds=1.0, resource="inter_host", model="", slowdown=slowdown_by_collective(device, channels))
    return Host().slowdown(kernel, [collective])


def cluster(device: str, fabric: str) -> Machine:
    use = ClusterUse(device=device, hosts=2, fabric=fabric)
    return machine_of(use, 16, directory=Path())


def test_collectives_reduce_the_available_multiprocessors() -> None:
    # 24 of an A100's 108 multiprocessors, and of an H100's 132, are the collective's.
    assert slowdown(ATTENTION, "a100_sxm80") == pytest.approx(108 / 84)
    assert slowdown(ATTENTION, "h100_sxm") == pytest.approx(132 / 108)
    assert slowdown(PRODUCT, "a100_sxm80") == pytest.approx(108 / 84)


def test_collectives_between_hosts_occupy_the_channels_of_their_fabric() -> None:
    # The fewer adapters a host has, the fewer channels NCCL uses: 8 for the four adapters of a p4d host.
    assert slowdown(PRODUCT, "a100_sxm80", channels=8) == pytest.approx(108 / 100)
    known = cluster("a100_sxm80", "efa_p4d"), cluster("a100_sxm80", "infiniband_hdr")
    found = [[machine.slowdown(link) for link in ("intra_host", "inter_host")] for machine in known]
    assert found == [[pytest.approx(108 / 84), pytest.approx(108 / 100)], [pytest.approx(108 / 84)] * 2]
    costs = OpCosts(machine=known[0])
    assert costs(gather(2**30)).slowdown == pytest.approx(108 / 84)
    assert costs(gather(2**30, ranks=16)).slowdown == pytest.approx(108 / 100)


def test_hopper_products_have_the_measured_slowdown() -> None:
    # 80% of the peak alone and 47% beside an all-gather.
    for name in ("h100_sxm", "h100_sxm96", "h200"):
        assert slowdown(PRODUCT, name) == pytest.approx(0.80 / 0.47, abs=1e-3)
        assert slowdown(PRODUCT, name, channels=8) == pytest.approx(0.80 / 0.47, abs=1e-3)


def test_movement_uses_the_remaining_bandwidth() -> None:
    device = profile("h100_sxm")
    rate = device.movement["copy"][0].rate
    collective = gather(2**30)
    # 7/8 of the buffer are received, and as many sent, in a time in which copies would move four times as much.
    seconds = 4 * 2 * 7 / 8 * 2**30 / rate
    share = memory_of_collective(collective, seconds, device)
    assert share == pytest.approx(0.25)
    kernel = Cost(
        seconds=1.0, resource="compute", model="", beside=beside_collectives(MOVEMENT, device),
        memory=memory_share(rate, 1.0, device),
    )  # fmt: skip
    beside = Cost(seconds=seconds, resource="intra_host", model="", memory=share)
    assert Host(compute_slowdown=1.5).slowdown(kernel, [beside]) == pytest.approx(1 / 0.75)
    assert Host(compute_slowdown=1.5).slowdown(kernel, []) == 1.0


def test_profile_without_channels_has_a_uniform_slowdown() -> None:
    device = profile("cpu")
    assert beside_collectives(PRODUCT, device) is None
    assert memory_of_collective(gather(2**20), 1e-3, device) == 0.0
    kernel = Cost(seconds=1.0, resource="compute", model="")
    assert Host(compute_slowdown=1.2).slowdown(kernel, [kernel]) == 1.2


def test_collective_of_one_rank_uses_no_bandwidth() -> None:
    assert memory_of_collective(gather(2**20, ranks=1), 1e-3, profile("h100_sxm")) == 0.0
