"""`mesh`: the axes over which devices are laid out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from legoai.specs.directives.base import Directive, option
from legoai.specs.directives.kinds import Integer

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
"""Every axis, outermost first. `ep` is last because it is no axis of its own: see :class:`Mesh`."""
DATA_AXES = ("dp_replicate", "dp_shard")
"""The axes whose ranks read different samples, outermost first."""

_SIZE = Integer(minimum=1, rest=True)
_GROUPS = Integer(minimum=1)


class Mesh(Directive):
    """The device mesh: a size for each axis; an axis that is not named has size 1.

    Axes are nested as PyTorch nests them, `pp` outermost and `tp` innermost, so that `tp` stays inside a host. The
    product of `pp`, `dp_replicate`, `dp_shard`, `cp` and `tp` is the number of devices. `ep` takes no devices of its
    own: it groups the ranks of `dp_shard` and `cp`, which hold different experts where they would otherwise hold shards
    of all. `rest` is the size of one axis that takes the devices which the others leave: `mesh (dp_shard = rest, tp =
    8)`.
    """

    keyword: ClassVar[str] = "mesh"
    absent: ClassVar[Mapping[str, Any] | None] = {}

    pp: int = option(_SIZE, doc="Pipeline parallel: stages on different ranks.", default=1)
    dp_replicate: int = option(_SIZE, doc="Data parallel: whole replicas.", default=1)
    dp_shard: int = option(_SIZE, doc="Data parallel: fully sharded.", default=1)
    cp: int = option(_SIZE, doc="Context parallel: the sequence in pieces.", default=1)
    tp: int = option(_SIZE, doc="Tensor parallel: matrices in pieces.", default=1)
    ep: int = option(
        _GROUPS,
        doc="Expert parallel: experts on different ranks of `dp_shard` and `cp`, and with `across_tp` of `tp`.",
        default=1,
    )

    def size(self, axis: str) -> int:
        """The number of ranks along ``axis``."""
        size: int = getattr(self, axis)
        return size

    @property
    def world_size(self) -> int:
        """The number of devices."""
        return math.prod(self.size(axis) for axis in AXES if axis != "ep")

    @property
    def data_parallel(self) -> int:
        """The number of ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    def stride(self, axis: str) -> int:
        """The difference between the global ranks of neighbours on ``axis``, which is not `ep`."""
        axes = [name for name in AXES if name != "ep"]
        return math.prod(self.size(inner) for inner in axes[axes.index(axis) + 1 :])

    def used(self) -> tuple[str, ...]:
        """The axes of more than one rank that have devices of their own, outermost first."""
        return tuple(axis for axis in AXES if axis != "ep" and self.size(axis) > 1)
