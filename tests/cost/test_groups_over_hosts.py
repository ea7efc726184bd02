"""Estimates of plans some of whose groups lie on one host, and others of the same axis on two."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.cost.estimate import Estimate, estimate
from legoai.cost.machine.collective_time import seconds_on
from legoai.cost.network.topology import Placement
from legoai.cost.trace.records import Collective
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from support.simulation.simulator import in_the_simulator

PLAN = """\
plan test
model llama3("1b", n_layers = 4, tie_embeddings = false)
cluster h100_sxm(hosts = 3, fabric = infiniband_ndr)
attention flash
batch (global = {batch}, micro = 1, seq_len = 1024)
mesh ({mesh})
fsdp blocks on {axes}
{pipeline}
"""

INSIDE, OVER = Placement(6, 1, 6), Placement(6, 2, 4, short=2)
"""Ranks 0 to 5, and ranks 6 to 11."""


def gathers(mesh: str, axes: str, batch: int, pipeline: str) -> list[list[tuple[str, float, float, float]]]:
    """For each rank its all-gathers: link, seconds, and those of a group on one host and of one on two."""
    linted = lint(PLAN.format(mesh=mesh, axes=axes, batch=batch, pipeline=pipeline), "test.plan", directory=Path())
    assert linted.analysis is not None and not linted.has_errors, linted.diagnostics
    found = estimate(lower(linted.analysis), linted.analysis.plan, linted.analysis.manifest)
    return [list(_gathers(found, place)) for place in range(len(found.ranks))]


def _gathers(found: Estimate, place: int):
    network, profile = found.machine.network, found.machine.profile
    for interval in found.ranks[place].intervals:
        record = interval.record
        if isinstance(record, Collective) and record.kind == "all_gather" and record.axis == "dp_shard":
            alone = (seconds_on(on, record.kind, record.bytes, network, profile)[0] for on in (INSIDE, OVER))
            yield interval.cost.resource, interval.cost.seconds, *alone


def test_collective_of_the_first_rank_is_as_slow_as_that_of_another_group():
    [found] = in_the_simulator(gathers, "dp_replicate = 4, dp_shard = 6", "dp_replicate, dp_shard", 24, "")
    assert found
    for link, seconds, inside, over in found:
        assert (link, seconds) == ("inter_host", over)
        assert over > inside


@pytest.mark.slow
def test_collective_of_a_stage_is_as_slow_as_its_own_group():
    pipeline = "pipeline on pp (schedule = 1F1B)"
    ranks = in_the_simulator(gathers, "pp = 4, dp_shard = 6", "dp_shard", 48, pipeline)
    # Stages begin at ranks 0, 6, 12 and 18: the second and the third lie over two hosts.
    for found, over_hosts in zip(ranks, (False, True, True, False), strict=True):
        assert found
        for link, seconds, inside, over in found:
            assert (link, seconds) == (("inter_host", over) if over_hosts else ("intra_host", inside))
