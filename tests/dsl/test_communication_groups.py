"""Groups of ranks that communicate, as `diff` compares them, against the groups of a device mesh."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from legoai.dsl.differences.communication import groups_of
from legoai.dsl.lint import lint

MESHES = [
    ("cpu(devices = 16)", {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}, "dp_replicate, dp_shard, cp", 16),
    (
        "h100_sxm(hosts = 4, fabric = infiniband_ndr)",
        {"dp_replicate": 2, "dp_shard": 8, "tp": 2},
        "dp_replicate, dp_shard",
        8,
    ),
    ("h100_sxm(hosts = 2, fabric = infiniband_ndr)", {"dp_shard": 2, "cp": 4, "tp": 2}, "dp_shard, cp", 8),
    ("h100_sxm(hosts = 2, fabric = infiniband_ndr)", {"dp_shard": 16, "ep": 4}, "dp_shard", 8),
]


@pytest.mark.parametrize(("cluster", "sizes", "on", "per_host"), MESHES)
def test_communication_groups_equal_mesh_groups(cluster: str, sizes: dict[str, int], on: str, per_host: int):
    model = 'mixtral("8x7b", n_layers = 1)' if "ep" in sizes else 'llama3("8b", n_layers = 1)'
    text = f"plan x\nmodel {model}\ncluster {cluster}\nbatch (global = 64, micro = 1, seq_len = 2048)\n"
    text += f"mesh ({', '.join(f'{axis} = {size}' for axis, size in sizes.items())})\nfsdp blocks on {on}\n"
    text += "shard standard on tp\n" * ("tp" in sizes) + "context on cp\n" * ("cp" in sizes)
    text += "shard on ep { layers.*.feed_forward.experts = experts }\n" * ("ep" in sizes)
    axes = [axis for axis in sizes if axis != "ep"]
    ranks = np.arange(np.prod([sizes[axis] for axis in axes])).reshape([sizes[axis] for axis in axes])
    analysis = lint(text, "x.plan", directory=Path()).analysis
    assert analysis is not None
    found = groups_of(analysis)
    assert len(found) >= len(axes)
    for group in found:
        if group.axes == ("ep",):
            rows = ranks.reshape(-1, sizes["ep"])
        else:
            places = [axes.index(axis) for axis in group.axes]
            rows = np.moveaxis(ranks, places, range(-len(places), 0)).reshape(-1, group.ranks)
        assert rows.shape == (group.groups, group.ranks)
        steps = {int(step) for step in np.diff(rows, axis=1).flat}
        assert group.stride == (steps.pop() if len(steps) == 1 else None)
        assert group.hosts == max(len({int(rank) // per_host for rank in row}) for row in rows)
