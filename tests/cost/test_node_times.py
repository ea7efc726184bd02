"""Predicted times of the nodes of a graph."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from legoai.cost.node_times import NodeTimes
from legoai.cost.trace.records import Collective


def test_collective_takes_the_same_time_on_ranks_of_all_groups(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 24)
    costs = NodeTimes("h100_sxm", devices=8, hosts=3, fabric="infiniband_ndr").costs
    one_host, two_hosts = (
        costs(
            Collective(work=0, stream=0, kind="all_gather", ranks=tuple(range(first, first + 6)), axis="", bytes=2**28,
                       dtype="bfloat16", module="", phase="other")
        )
        for first in (0, 6)
    )  # fmt: skip
    assert one_host == two_hosts
    assert one_host.resource == "inter_host"
