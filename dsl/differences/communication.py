"""Groups of ranks that communicate: of each mesh axis, and of the axes that statements join."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.parallelism.experts import groups_of_experts
from legoai.dsl.analysis.parallelism.mesh import devices_per_host, mesh_axes, replicating_axes, sharded_axes
from legoai.specs.directives.hole import Undecided
from legoai.specs.directives.mesh import AXES
from legoai.specs.record import Record


class Group(Record, kw_only=True):
    """The groups of one axis, or of several together: `dp_shard+cp`.

    Attributes:
        axes: outermost first.
        ranks: of one group.
        stride: from one rank of a group to the next; None where the ranks have no single one.
        groups: number of groups, which communicate concurrently.
        hosts: number of hosts that the widest group spans; None where the number of devices per host is not known.
    """

    axes: tuple[str, ...]
    ranks: int
    stride: int | None
    groups: int
    hosts: int | None

    @property
    def name(self) -> str:
        """The axes in one word."""
        return "+".join(self.axes)

    @property
    def words(self) -> str:
        """The groups in words: `64 groups of 8 ranks, stride 1, inside a host`."""
        stride = "" if self.stride is None else f", stride {self.stride}"
        where = "" if self.hosts is None else ", inside a host" if self.hosts == 1 else f", across {self.hosts} hosts"
        return f"{self.groups} group{'s' * (self.groups != 1)} of {self.ranks} ranks{stride}{where}"


def groups_of(analysis: Analysis) -> tuple[Group, ...] | None:
    """The groups of more than one rank in which ranks of a plan communicate; None where its mesh has a hole."""
    try:
        return tuple(_groups(analysis))
    except Undecided:
        return None


def _groups(analysis: Analysis) -> Iterator[Group]:
    mesh = analysis.plan.mesh
    sizes = {axis: mesh.size(axis) for axis in AXES if axis != "ep"}
    places, stride = {}, 1
    for axis in reversed(sizes):
        places[axis] = (sizes[axis], stride)
        stride *= sizes[axis]
    per_host = devices_per_host(analysis)
    if per_host is not None and analysis.plan.cluster.hosts == 1:
        per_host = max(per_host, mesh.world_size)

    def along(axes: Iterable[str]) -> list[int]:
        return _offsets([places[axis] for axis in axes])

    used = [axis for axis in mesh_axes(analysis) if sizes[axis] > 1]
    joined = [axes for axes in (replicating_axes(analysis), sharded_axes(analysis)) if len(axes) > 1]
    for axes in (*((axis,) for axis in used), *joined):
        yield _group(axes, along(axes), along(axis for axis in sizes if axis not in axes), per_host)
    if mesh.ep > 1:
        # Neighbours among the ranks that hold experts: see `legoai.runtime.parallelism.mesh.split_off_experts`.
        shards = next(reversed(groups_of_experts(analysis)), ())
        ranks, others = along(shards), along(axis for axis in sizes if axis not in shards)
        starts = [first + start for start in others for first in ranks[:: mesh.ep]]
        yield _group(("ep",), ranks[: mesh.ep], starts, per_host)


def _group(axes: tuple[str, ...], members: Sequence[int], starts: Sequence[int], per_host: int | None) -> Group:
    """The groups whose ranks are at offsets ``members`` from each of ``starts``."""
    steps = {after - before for before, after in itertools.pairwise(members)}
    hosts = None
    if per_host is not None:
        hosts = max(len({(start + rank) // per_host for rank in members}) for start in starts)
    stride = steps.pop() if len(steps) == 1 else None
    return Group(axes=axes, ranks=len(members), stride=stride, groups=len(starts), hosts=hosts)


def _offsets(axes: Sequence[tuple[int, int]]) -> list[int]:
    """The ranks along axes from rank 0, each axis given by its size and stride, the first outermost."""
    ranges = [range(0, size * stride, stride) for size, stride in axes]
    return [sum(offsets) for offsets in itertools.product(*ranges)]
