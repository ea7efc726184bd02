"""Network models: traffic of algorithms, bandwidth by size, topology and stragglers."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from legoai.cost.machine.collective_time import Network, estimate, network_of, seconds_on
from legoai.cost.measurements.interpolation import Measured
from legoai.cost.network.algorithms import ALGORITHMS, traffic
from legoai.cost.network.bandwidth import Sigmoid
from legoai.cost.network.fabric import fabric_model
from legoai.cost.network.statistics import Regression, Straggler
from legoai.cost.network.topology import Placement, placement
from legoai.cost.profiles import ProfileError, profile
from legoai.cost.trace.records import Collective
from legoai.specs.cluster import Cluster, device, fabric, fabric_names

MIB = 2**20


def cluster(hosts: int = 1, name: str = "h100_sxm", between: str = "infiniband_ndr") -> Cluster:
    wires = fabric(between) if hosts > 1 else None
    return Cluster(device=device(name), hosts=hosts, devices_per_host=8, fabric=wires)


def collective(kind: str, ranks: tuple[int, ...], size: int) -> Collective:
    return Collective(
        work=0, stream=0, kind=kind, ranks=ranks, axis="", bytes=size, dtype="bfloat16", module="", phase="forward"
    )


def test_placement_counts_hosts_and_ranks_per_host() -> None:
    assert placement(range(8), 8) == Placement(8, 1, 8)
    assert placement(range(16), 8) == Placement(16, 2, 8)
    assert placement(range(0, 32, 8), 8) == Placement(4, 4, 1)
    assert placement([0, 1, 8, 9], 8) == Placement(4, 2, 2)
    assert placement(range(12), 8) == Placement(12, 2, 8, short=4)
    assert placement(range(6, 18), 8) == Placement(12, 3, 8, short=6)


def simulate_ring_all_gather(hosts: int, per_host: int) -> tuple[float, float]:
    """Bytes over a link and an adapter, of a buffer of one byte for each rank, by passing pieces along r rings."""
    ranks = hosts * per_host
    links: dict[tuple[int, int], float] = {}
    for ring in range(per_host):
        # Each ring goes through a host's ranks from another one, so that each rank crosses once.
        order = [host * per_host + (ring + step) % per_host for host in range(hosts) for step in range(per_host)]
        for index, rank in enumerate(order):
            edge = (rank, order[(index + 1) % ranks])
            links[edge] = links.get(edge, 0.0) + (ranks - 1) / per_host
    inside: dict[int, float] = {}
    outside: dict[int, float] = {}
    for (source, target), sent in links.items():
        into = inside if source // per_host == target // per_host else outside
        into[source] = into.get(source, 0.0) + sent
    return max(inside.values(), default=0.0), max(outside.values(), default=0.0)


UNEVEN = [(8, 4), (4, 8), (8, 1), (2, 8, 2), (6, 6), (3, 5, 4), (7, 8)]
"""Ranks of a group on each of its hosts."""


def on_hosts(counts: tuple[int, ...]) -> list[list[int]]:
    """The ranks of a group on each host of 8 devices."""
    return [list(range(8 * host, 8 * host + count)) for host, count in enumerate(counts)]


def rings_over(counts: tuple[int, ...]) -> list[list[int]]:
    """Rings that visit all ranks host by host, so many that each rank of a host leaves it equally often."""
    return [
        [ranks[(ring + step) % len(ranks)] for ranks in on_hosts(counts) for step in range(len(ranks))]
        for ring in range(math.lcm(*counts))
    ]


def busiest(sent: dict[tuple[int, int], float]) -> tuple[float, float]:
    """Most bytes that a device sends or receives over its link, and over its adapter, from those between ranks."""
    most = []
    for inside in (True, False):
        ends: dict[tuple[str, int], float] = {}
        for (source, target), size in sent.items():
            if (source // 8 == target // 8) is inside:
                for end in (("out", source), ("in", target)):
                    ends[end] = ends.get(end, 0.0) + size
        most.append(max(ends.values(), default=0.0))
    return most[0], most[1]


@pytest.mark.parametrize("counts", UNEVEN)
def test_ring_adapters_of_the_host_with_fewest_ranks_carry_most(counts: tuple[int, ...]) -> None:
    rings, ranks = rings_over(counts), sum(counts)
    sent: dict[tuple[int, int], float] = {}
    for order in rings:
        for piece in range(ranks):  # which its owner begins to pass on, and which the rank before it gets last
            for step in range(ranks - 1):
                edge = order[(piece + step) % ranks], order[(piece + step + 1) % ranks]
                sent[edge] = sent.get(edge, 0.0) + 1 / len(rings)
    link, adapter = busiest(sent)
    on = placement([rank for host in on_hosts(counts) for rank in host], 8)
    found = traffic("all_gather", float(ranks), on)[0]
    assert found.adapter_bytes == pytest.approx(adapter)
    assert link <= found.link_bytes + 1e-9
    assert traffic("all_reduce", float(ranks), on)[0].adapter_bytes == pytest.approx(2 * adapter)


@pytest.mark.parametrize("counts", UNEVEN)
def test_broadcast_chains_enter_the_host_with_fewest_ranks_over_its_adapters(counts: tuple[int, ...]) -> None:
    # Which host is the first, and sends only, makes no difference to the busiest adapter but where it has fewest.
    rings = rings_over(counts)
    sent: dict[tuple[int, int], float] = {}
    for order in rings:
        for edge in itertools.pairwise(order):
            sent[edge] = sent.get(edge, 0.0) + 1 / len(rings)
    on = placement([rank for host in on_hosts(counts) for rank in host], 8)
    assert traffic("broadcast", 1.0, on)[0].adapter_bytes == pytest.approx(busiest(sent)[1])


@pytest.mark.parametrize("counts", UNEVEN)
def test_uneven_all_to_all_traffic_equals_pairwise_traffic(counts: tuple[int, ...]) -> None:
    ranks = [rank for host in on_hosts(counts) for rank in host]
    link, adapter = busiest(dict.fromkeys(itertools.permutations(ranks, 2), 1.0))
    found = traffic("all_to_all", float(len(ranks)), placement(ranks, 8))[0]
    assert (found.link_bytes, found.adapter_bytes) == pytest.approx((link, adapter))


@pytest.mark.parametrize("counts", UNEVEN)
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_uneven_group_is_no_faster_than_the_adapters_of_its_smallest_host(kind: str, counts: tuple[int, ...]) -> None:
    network, ranks = network_of(cluster(len(counts))), [rank for host in on_hosts(counts) for rank in host]
    took, _ = estimate(collective(kind, tuple(ranks), 1024 * MIB), network, profile("h100_sxm"))
    fewest = min(counts)
    others = len(ranks) - fewest
    # What a host lacks must come in over its ranks' own adapters of 50 GB/s each.
    lacks = {"all_reduce": len(ranks), "all_to_all": fewest * others}.get(kind, others)
    least = lacks / len(ranks) * 1024 * MIB / fewest / 50e9
    assert took > least


def test_no_table_is_of_a_group_with_unequal_numbers_of_ranks() -> None:
    network = network_of(cluster(8))
    assert network.fabric is not None and ("all_reduce", 8, 8) in network.fabric.measured
    for short, model in ((0, "measured table"), (4, "analytical")):
        on = Placement(64 - short, 8, 8, short=short)
        assert seconds_on(on, "all_reduce", 1024 * MIB, network, profile("h100_sxm"))[1] == model


def depth_of_a_heap(hosts: int) -> int:
    """Edges from the deepest host of a binary tree to its root, where host i hangs below host (i - 1) // 2."""
    edges, host = 0, hosts - 1
    while host:
        host, edges = (host - 1) // 2, edges + 1
    return edges


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 7, 8, 9, 16, 33, 128, 1000])
@pytest.mark.parametrize("kind", ["all_reduce", "barrier"])
def test_tree_hops_are_twice_the_levels(kind: str, hosts: int) -> None:
    on = Placement(ranks=hosts * 8, hosts=hosts, per_host=8)
    tree = next(item for item in traffic(kind, 2.0**20, on) if item.algorithm == "tree")
    levels = next(level for level in itertools.count() if 2**level >= hosts)
    assert tree.hops == 2 * levels  # up to reduce, down to broadcast
    assert levels - depth_of_a_heap(hosts) in (0, 1)  # one leaf more where the last level is full of one


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 4), (4, 2), (3, 8), (4, 1)])
def test_ring_traffic_equals_a_simulated_ring(hosts: int, per_host: int) -> None:
    on = Placement(ranks=hosts * per_host, hosts=hosts, per_host=per_host)
    sent = traffic("all_gather", float(on.ranks), on)[0]
    link, adapter = simulate_ring_all_gather(hosts, per_host)
    assert sent.adapter_bytes == pytest.approx(adapter)
    # A ring's crossing is on the adapter, not on a link: of P links of r rings, hosts do not stay inside.
    assert link <= sent.link_bytes + 1e-9
    assert sent.hops == hosts - 1


@pytest.mark.parametrize(("hosts", "per_host"), [(1, 8), (2, 4), (4, 1)])
def test_all_to_all_traffic_equals_pairwise_traffic(hosts: int, per_host: int) -> None:
    on = Placement(ranks=hosts * per_host, hosts=hosts, per_host=per_host)
    pairs = [(a, b) for a, b in itertools.permutations(range(on.ranks), 2) if a == 0]
    inside = sum(b // per_host == 0 for _, b in pairs)
    sent = traffic("all_to_all", float(on.ranks), on)[0]
    assert sent.link_bytes == pytest.approx(inside)
    assert sent.adapter_bytes == pytest.approx(len(pairs) - inside)


def test_ring_all_reduce_is_reduce_scatter_plus_all_gather() -> None:
    on = Placement(ranks=16, hosts=2, per_host=8)
    ring = traffic("all_reduce", 1e9, on)[0]
    both = [traffic(kind, 1e9, on)[0] for kind in ("reduce_scatter", "all_gather")]
    assert ring.link_bytes == pytest.approx(sum(one.link_bytes for one in both))
    assert ring.adapter_bytes == pytest.approx(sum(one.adapter_bytes for one in both))


def test_tree_halves_ring_traffic_for_two_hosts_only() -> None:
    for hosts, share in ((2, 0.53), (64, 0.99)):
        ring, tree = traffic("all_reduce", 1e9, Placement(ranks=8 * hosts, hosts=hosts, per_host=8))
        assert tree.adapter_bytes / ring.adapter_bytes == pytest.approx(share, abs=0.01)


def test_bandwidth_increases_with_size() -> None:
    curve = Sigmoid(limit=4e11, steepness=0.7, middle=math.log(16 * MIB))
    rates = [curve.at(2.0**power) for power in range(40)]
    assert rates == sorted(rates)
    assert rates[0] > 0
    assert curve.at(16 * MIB) == pytest.approx(2e11, rel=1e-6)
    assert rates[-1] == pytest.approx(4e11, rel=0.01)


def test_measured_times_are_interpolated() -> None:
    table = Measured(sizes=(1e6, 4e6, 16e6), seconds=(1e-5, 2e-5, 6e-5))
    assert table.at(4e6) == pytest.approx(2e-5)
    assert table.at(2e6) == pytest.approx(math.sqrt(2) * 1e-5)
    assert table.at(32e6) == pytest.approx(12e-5)
    assert table.at(1e3) == 1e-5
    assert table.at(1e12) is None


def test_regression_recovers_its_coefficients() -> None:
    rows = [
        (t := 1e-3 * scale, 1e-5 * ranks, ranks, 1e6 * scale, 1.3 * t + 2e-5 * ranks)
        for ranks in (4, 8, 16, 32)
        for scale in (1, 3, 10, 30)
    ]
    fitted = Regression.fit(rows)
    for *inputs, measured in rows:
        assert fitted.seconds(*inputs) == pytest.approx(measured, rel=0.05)


def test_regression_stays_within_a_half_and_twenty_times_of_the_model() -> None:
    for constant, factor in ((-1.0, 0.5), (1.0, 20.0)):
        fitted = Regression(coefficients=(constant, *[0.0] * 7), ranks=(2, 8), bytes=(1.0, 1e9))
        assert fitted.seconds(0.01, 0.0, 4, 1e6) == pytest.approx(factor * 0.01)


def test_regression_is_updated_towards_an_observed_run() -> None:
    before = Regression(coefficients=(0.0, 1.0, *[0.0] * 6), ranks=(2, 64), bytes=(1.0, 1e9))
    row = (0.01, 1e-4, 16, 1e8, 0.013)
    small, exact = (before.updated([row], rate=rate) for rate in (0.1, 1.0))
    assert 0.01 < small.seconds(*row[:4]) < 0.013
    assert exact.seconds(*row[:4]) == pytest.approx(0.013)


def test_straggler_ratio_is_at_least_one_and_robust() -> None:
    rows = [(ranks, 1e8, 1 + 0.001 * ranks) for ranks in (8, 64, 256, 1024)] + [(64, 1e8, 50.0)]
    fitted = Straggler.fit(rows)
    assert fitted.ratio(1024, 1e8) == pytest.approx(2.0, rel=0.1)
    assert fitted.ratio(2, 1) >= 1.0
    assert fitted.ratio(10**6, 1e8) == fitted.ratio(1024, 1e8)


@pytest.mark.parametrize(
    ("name", "kind", "ranks", "size", "seconds", "within"),
    [
        # Of XLA's table, vTrain's, and nccl-tests in https://github.com/NVIDIA/dgxc-benchmarking.
        ("h100_sxm", "all_gather", 8, 512 * MIB, 1392e-6, 0.05),
        ("h100_sxm", "all_reduce", 8, 1024 * MIB, 4029e-6, 0.05),
        ("b200", "reduce_scatter", 8, 2048 * MIB, 2928e-6, 0.05),
        ("a100_sxm80", "all_reduce", 4, 512 * MIB, 3720e-6, 0.05),
    ],
)  # fmt: skip
def test_one_host_times_equal_measurements(name, kind, ranks, size, seconds, within) -> None:
    found, model = estimate(collective(kind, tuple(range(ranks)), size), network_of(cluster(name=name)), profile(name))
    assert found == pytest.approx(seconds, rel=within)
    assert model == "measured table"


@pytest.mark.parametrize("name", ["h100_sxm", "a100_sxm80", "b200"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_unmeasured_broadcast_is_an_all_gather_of_as_many_bytes_over_a_link(name: str, ranks: int) -> None:
    found, network, size = profile(name), network_of(cluster(name=name)), 1024 * MIB
    assert "broadcast" not in found.links
    on = Placement(ranks, 1, ranks)
    seconds = seconds_on(on, "broadcast", size, network, found)
    assert seconds == seconds_on(on, "all_gather", size * ranks / (ranks - 1), network, found)
    assert size / seconds[0] < device(name).link.bandwidth_bytes_per_second


def test_group_with_one_rank_per_host_uses_one_adapter() -> None:
    network, h100 = network_of(cluster(8)), profile("h100_sxm")
    size = 1024 * MIB
    wide = estimate(collective("all_gather", tuple(range(64)), size), network, h100)[0]
    thin = estimate(collective("all_gather", tuple(range(0, 64, 8)), size), network, h100)[0]
    rate = 7 / 8 * size / thin
    assert 0.6 * 50e9 < rate < 50e9
    assert 5 < thin / wide < 10


@pytest.mark.parametrize("ranks", [(0, 1), tuple(range(8)), tuple(range(16)), (0, 2, 4, 6, 8, 10, 12, 14)])
def test_permute_takes_as_long_as_a_transfer_between_its_farthest_neighbours(ranks: tuple[int, ...]) -> None:
    network, h100, size = network_of(cluster(2)), profile("h100_sxm"), 1024 * MIB
    pairs = zip(ranks, (*ranks[1:], ranks[0]), strict=True)
    alone = [estimate(collective("send", pair, size), network, h100)[0] for pair in pairs]
    found, _ = estimate(collective("permute", ranks, size), network, h100)
    assert found == max(alone)
    assert size / found < (50e9 if ranks[-1] >= 8 else 450e9)


@pytest.mark.parametrize("kind", sorted(ALGORITHMS))
def test_time_grows_with_size_and_is_positive(kind: str) -> None:
    for hosts in (1, 4):
        network, h100 = network_of(cluster(hosts)), profile("h100_sxm")
        ranks = (0, 8 * hosts - 1) if kind in ("send", "receive") else tuple(range(8 * hosts))
        times = [
            estimate(collective(kind, ranks, MIB * 4**power), network, h100, straggler=False)[0] for power in range(6)
        ]
        assert times[0] > 0
        assert all(b >= 0.999 * a for a, b in itertools.pairwise(times)), (hosts, times)


def test_a_group_of_one_costs_nothing() -> None:
    assert estimate(collective("all_reduce", (3,), MIB), network_of(cluster()), profile("h100_sxm"))[0] == 0.0


def test_every_fabric_with_a_bandwidth_has_a_model() -> None:
    for name in fabric_names():
        if not fabric(name).has_figures:
            with pytest.raises(ProfileError, match=name):
                fabric_model(name)
        else:
            model = fabric_model(name)
            assert 0 < model.share.limit <= 1
            assert model.hop > 0
            assert model.held_out or model.derived


def test_derived_fabric_is_marked_derived() -> None:
    network = network_of(cluster(2, between="roce_400"))
    _, model = estimate(collective("all_gather", tuple(range(16)), MIB), network, profile("h100_sxm"))
    assert model == "analytical, derived"


def test_observed_time_on_a_derived_fabric_is_a_measurement() -> None:
    network = network_of(cluster(2, between="roce_400"))
    assert network.fabric is not None
    seen = Measured(sizes=(MIB,), seconds=(0.5,))
    observed = replace(network, fabric=replace(network.fabric, observed={("all_gather", 2, 8): seen}))
    on = Placement(ranks=16, hosts=2, per_host=8)
    answer = seconds_on(on, "all_gather", MIB, observed, profile("h100_sxm"), straggler=False)
    assert answer == (pytest.approx(0.5), "measured table")


def test_group_over_hosts_takes_no_less_than_a_measured_one_of_one_host() -> None:
    known, network = profile("h100_sxm"), network_of(cluster(2, between="roce_400"))
    slow = Measured(sizes=(32 * MIB, 128 * MIB), seconds=(1.0, 2.0))
    for measured, less in ((slow, False), (None, True)):
        curve = replace(known.links["all_gather"][8], latency=1.0, measured=measured, derived="")
        slower = replace(known, links={**known.links, "all_gather": {8: curve}})
        on = Placement(ranks=16, hosts=2, per_host=8)
        seconds, _ = seconds_on(on, "all_gather", 64 * MIB, network, slower, straggler=False)
        assert (seconds < 1.0) == less


def test_measured_placement_returns_its_measurement() -> None:
    # 1 GiB over two hosts of a3-mega took 6759 microseconds; the straggler ratio is not known there.
    network = network_of(cluster(2, between="tcpxo_a3_mega"))
    on = Placement(ranks=16, hosts=2, per_host=8)
    seconds, model = seconds_on(on, "all_reduce", 1024 * MIB, network, profile("h100_sxm"))
    assert seconds == pytest.approx(6759e-6, rel=0.01)
    assert model == "measured table"


def test_estimates_are_cached() -> None:
    network: Network = network_of(cluster())
    item = collective("all_gather", tuple(range(8)), MIB)
    assert estimate(item, network, profile("h100_sxm")) is estimate(item, network, profile("h100_sxm"))


PLACES = [Placement(hosts * per_host, hosts, per_host) for hosts in (2, 4, 16, 64) for per_host in (1, 4, 8)]


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_time_and_bandwidth_are_monotonic_around_one_measurement(kind: str) -> None:
    network = network_of(cluster(64, between="efa_p5"))
    for on in PLACES:
        sizes = [2.0**power * MIB for power in range(13)]
        times = [seconds_on(on, kind, size, network, profile("h100_sxm"))[0] for size in sizes]
        for (small, less), (large, more) in itertools.pairwise(zip(sizes, times, strict=True)):
            assert less < more, (on, small)
            assert more / large <= less / small * (1 + 1e-9), (on, small)


def test_measured_group_has_its_time_at_the_measured_size() -> None:
    network = network_of(cluster(64, between="efa_p5"))
    assert network.fabric is not None
    for (kind, hosts, per_host), table in network.fabric.measured.items():
        on = Placement(hosts * per_host, hosts, per_host)
        [size], [seconds] = table.sizes, table.seconds
        assert seconds_on(on, kind, size, network, profile("h100_sxm")) == (pytest.approx(seconds), "measured table")


def test_unmeasured_reduce_scatter_uses_the_all_gather() -> None:
    network = network_of(cluster(2, between="efa_p5"))
    assert network.fabric is not None
    assert ("reduce_scatter", 2, 8) not in network.fabric.measured
    one, other = (
        seconds_on(Placement(16, 2, 8), kind, 2**28, network, profile("h100_sxm"))[0]
        for kind in ("all_gather", "reduce_scatter")
    )
    assert one == pytest.approx(other)
