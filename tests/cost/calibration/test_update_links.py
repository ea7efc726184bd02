"""Update of a profile's collectives by those of a run."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from legoai.cost.calibration.observed.collectives import CollectiveTimes
from legoai.cost.calibration.update_links import update_links
from legoai.cost.machine.collective_time import Network, network_of, seconds_on
from legoai.cost.network.topology import Placement
from legoai.cost.profiles import Profile, from_document, profile, read_document, shipped_file
from legoai.specs.cluster import Cluster, device, fabric


def test_group_with_unequal_numbers_of_ranks_corrects_no_table() -> None:
    cluster = Cluster(device=device("h100_sxm"), hosts=2, devices_per_host=8, fabric=fabric("infiniband_ndr"))
    document: dict[str, Any] = {"links": {}}
    found = CollectiveTimes()
    found.seconds["all_gather", Placement(12, 2, 8, short=4), 2**30].append(0.1)
    [part] = update_links(document, profile("h100_sxm"), [(found, network_of(cluster))], on_device=True)
    assert (part.name, part.result) == ("fabric infiniband_ndr all_gather of 2 x 4 to 8", "kept")
    assert document == {"links": {}}


def on_one_host(kind: Any, size: int, ranks: int, found: Profile) -> float:
    network = Network(devices_per_host=8, bandwidth=0.0, fabric=None)
    return seconds_on(Placement(ranks, 1, ranks), kind, size, network, found)[0]


def test_first_measurement_of_a_collective_changes_no_other_number_of_ranks() -> None:
    """The base takes its broadcast from all-gathers; one of two ranks leaves that of eight as it is."""
    base = profile("h100_sxm")
    document, _ = read_document(shipped_file("h100_sxm"))
    assert "broadcast" not in document["links"]
    found, cluster = CollectiveTimes(), Cluster(device=device("h100_sxm"), hosts=1, devices_per_host=8)
    for size in (2**17, 2**19, 2**21, 2**23, 2**25):
        found.seconds["broadcast", Placement(2, 1, 2), size] += [3 * on_one_host("broadcast", size, 2, base)] * 4
    [part] = update_links(document, base, [(found, network_of(cluster))], on_device=True)
    assert (part.name, part.result) == ("links broadcast of 2", "measured")
    new = from_document(document)
    for size in (2**12, 2**17, 3 * 2**20, 2**28, 2**32, 2**36):
        before = on_one_host("broadcast", size, 2, base)
        assert on_one_host("broadcast", size, 2, new) == pytest.approx(3 * before, rel=0.05), size
        for ranks in (4, 8):
            before = on_one_host("broadcast", size, ranks, base)
            assert on_one_host("broadcast", size, ranks, new) == pytest.approx(before, rel=0.02), (size, ranks)


def test_runs_on_two_fabrics_correct_each_its_own() -> None:
    base, runs, on = profile("h100_sxm"), [], Placement(16, 2, 8)
    sizes = [2**power for power in range(20, 30, 2)]
    clusters = {
        name: Cluster(device=device("h100_sxm"), hosts=2, devices_per_host=8, fabric=fabric(name))
        for name in ("infiniband_ndr", "infiniband_hdr")
    }

    def takes(name: str, size: int, found: Profile) -> float:
        network = network_of(clusters[name], profile=found)
        return seconds_on(on, "all_reduce", size, network, found, straggler=False)[0]

    for factor, (name, cluster) in enumerate(clusters.items(), 2):
        found = CollectiveTimes()
        for size in sizes:
            found.seconds["all_reduce", on, size] += [factor * takes(name, size, base)] * 2
            found.seconds["all_gather", Placement(8, 1, 8), size] += [
                1.5 * on_one_host("all_gather", size, 8, base)
            ] * 2
        runs.append((found, network_of(cluster)))
    document = copy.deepcopy(read_document(shipped_file("h100_sxm"))[0])
    parts = {part.name: part.result for part in update_links(document, base, runs, on_device=True)}
    assert parts == dict.fromkeys(
        ("links all_gather of 8", *(f"fabric {name} all_reduce of 2 x 8" for name in clusters)), "measured"
    )
    new = from_document(document)
    for factor, name in enumerate(clusters, 2):
        for size in sizes:
            assert takes(name, size, new) == pytest.approx(factor * takes(name, size, base), rel=0.01)
    assert on_one_host("all_gather", sizes[0], 8, new) == pytest.approx(
        1.5 * on_one_host("all_gather", sizes[0], 8, base), rel=0.01
    )
