"""Update of a profile's collectives by those of a run."""

from __future__ import annotations

from typing import Any

from legoai.cost.calibration.observed.collectives import CollectiveTimes
from legoai.cost.calibration.update_links import update_links
from legoai.cost.machine.collective_time import network_of
from legoai.cost.network.topology import Placement
from legoai.cost.profiles import profile
from legoai.specs.cluster import Cluster, device, fabric


def test_group_with_unequal_numbers_of_ranks_corrects_no_table() -> None:
    cluster = Cluster(device=device("h100_sxm"), hosts=2, devices_per_host=8, fabric=fabric("infiniband_ndr"))
    document: dict[str, Any] = {"links": {}}
    found = CollectiveTimes()
    found.seconds["all_gather", Placement(12, 2, 8, short=4), 2**30].append(0.1)
    [part] = update_links(document, profile("h100_sxm"), found, network_of(cluster), on_device=True)
    assert (part.name, part.result) == ("fabric all_gather of 2 x 4 to 8", "kept")
    assert document == {"links": {}}
