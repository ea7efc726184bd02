"""Placements of all groups of a mesh axis, against an array of its ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest

from legoai.cost.machine.collective_time import estimate, network_of, seconds_on, slowest_placement
from legoai.cost.network.topology import Placement, World, group_placements, placement, possible_placements
from legoai.cost.profiles import profile
from legoai.cost.trace.records import Collective
from legoai.specs.cluster import Cluster, device, fabric

MESHES = [(1, 4, 6), (1, 3, 8), (4, 1, 6), (2, 2, 6), (1, 8, 3), (3, 2, 2, 2), (1, 2, 4, 3), (4, 5, 2), (1, 48), (6, 4)]
"""Sizes of axes, the stages of a pipeline first."""


def groups(mesh: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    """The groups along some axes together, in the order of their first ranks."""
    ranks = np.arange(math.prod(mesh)).reshape(mesh)
    return np.moveaxis(ranks, axes, range(-len(axes), 0)).reshape(-1, math.prod(mesh[axis] for axis in axes))


def every_group(mesh: tuple[int, ...]) -> Iterator[tuple[bool, np.ndarray]]:
    """All groups of each choice of axes, and whether they are inside of a stage."""
    for count in range(1, len(mesh) + 1):
        for axes in itertools.combinations(range(len(mesh)), count):
            if math.prod(mesh[axis] for axis in axes) > 1:
                yield 0 not in axes or mesh[0] == 1, groups(mesh, axes)


@pytest.mark.parametrize("per_host", [1, 3, 4, 8])
@pytest.mark.parametrize("mesh", MESHES)
def test_placements_are_those_of_all_groups_of_the_stage(mesh: tuple[int, ...], per_host: int) -> None:
    world = World(math.prod(mesh), mesh[0])
    for inside, rows in every_group(mesh):
        for row in rows:
            beside = [other for other in rows if not inside or other[0] // world.of_stage == row[0] // world.of_stage]
            found = group_placements(tuple(row.tolist()), per_host, world)
            assert set(found) == {placement(other.tolist(), per_host) for other in beside}
            assert found[0] == placement(row.tolist(), per_host)
            assert len(set(found)) == len(found)


@pytest.mark.parametrize("per_host", [3, 4, 8])
@pytest.mark.parametrize("mesh", MESHES)
def test_possible_placements_contain_those_of_every_world(mesh: tuple[int, ...], per_host: int) -> None:
    for _, rows in every_group(mesh):
        possible = possible_placements(tuple(rows[0].tolist()), per_host)
        assert set(possible) >= {placement(row.tolist(), per_host) for row in rows}


def test_possible_placements_of_aligned_groups_are_one() -> None:
    for ranks in (range(8), range(4), range(16), range(0, 64, 8), range(0, 8, 2)):
        assert possible_placements(tuple(ranks), 8) == (placement(ranks, 8),)


def test_experts_groups_are_neighbours_among_the_ranks_of_other_axes() -> None:
    # 3 hosts, dp_shard = 8, ep = 2 and tp = 3: ranks 0 and 3, 1 and 4, 2 and 5, 6 and 9, …
    found = group_placements((0, 3), 8, World(24))
    rows = groups((1, 4, 2, 3), (2,))
    assert set(found) == {placement(row.tolist(), 8) for row in rows} == {Placement(2, 1, 2), Placement(2, 2, 1)}


def test_pairs_of_stages_are_all_ranks_of_both() -> None:
    # Stages of 6: of ranks 0 and 6 both are on the first host, 2 and 8 are not, and so for stages that are not next.
    world = World(24, 4)
    both = {Placement(2, 1, 2), Placement(2, 2, 1)}
    assert set(group_placements((0, 6), 8, world)) == set(group_placements((6, 0), 8, world)) == both
    assert group_placements((0, 18), 8, world) == (Placement(2, 2, 1),)
    assert group_placements((0, 8), 8, World(16, 2)) == (Placement(2, 2, 1),)


def test_ranks_along_no_axis_have_their_own_placement() -> None:
    for ranks in ((0, 1, 3), (1, 2), (0, 5), (0, 1, 2, 4, 5, 7), (0, 7, 23)):
        assert group_placements(ranks, 8, World(24)) == (placement(ranks, 8),)


def test_collective_takes_as_long_as_in_the_slowest_group() -> None:
    cluster = Cluster(device=device("h100_sxm"), hosts=3, devices_per_host=8, fabric=fabric("infiniband_ndr"))
    network, h100, mesh = network_of(cluster), profile("h100_sxm"), (1, 4, 6)
    for kind, axes, size in itertools.product(("all_gather", "all_reduce"), ((1,), (2,), (1, 2)), (2**16, 2**28)):
        rows = groups(mesh, axes)
        each = [seconds_on(placement(row.tolist(), 8), kind, size, network, h100) for row in rows]
        for row in rows:
            one = Collective(work=0, stream=0, kind=kind, ranks=tuple(row.tolist()), axis="", bytes=size,
                             dtype="bfloat16", module="", phase="forward")  # fmt: skip
            assert estimate(one, network, h100, world=World(24)) == max(each)
            assert estimate(one, network, h100) == seconds_on(placement(row.tolist(), 8), kind, size, network, h100)


@pytest.mark.parametrize("ends", list(itertools.permutations(range(8), 2)))
def test_copies_from_peers_stay_on_the_host_of_their_group(ends: tuple[int, int]) -> None:
    # Two ranks of a group of 8 are no group themselves: pairs at their distance on other hosts would reach over two.
    copy = Collective(
        work=0, stream=0, kind="peer_copy", ranks=ends, axis="tp", bytes=2**25, dtype="bfloat16", module="",
        phase="forward",
    )  # fmt: skip
    cluster = Cluster(device=device("h100_sxm"), hosts=24, devices_per_host=8, fabric=fabric("infiniband_ndr"))
    network = network_of(cluster)
    assert slowest_placement(copy, network, profile("h100_sxm"), World(192)).hosts == 1
