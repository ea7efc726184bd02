"""Selective unsharding: units stay unsharded where memory allows it (Tanaka et al. 2025, section 4.3).

    gather(w), forward(w) … gather(w), backward(w)   ->  gather(w), forward(w) … backward(w)

All-gathers of backward are left out first for units whose all-gathers take most time per byte that stays. If a step has
several micro batches, the all-gathers of later ones are left out too (:mod:`~legoai.lowering.graph.passes.keep`).
Whether a unit fits is decided by the memory curve of the graph, after the passes that prefetch and that offload; it is
the same on every rank. So are measured times, on which ranks have agreed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final

from torch import fx

from legoai.lowering.graph.passes.keep import made_of
from legoai.lowering.graph.passes.memory import Life, held, lives
from legoai.lowering.graph.passes.overlap import Collective, gathers_of
from legoai.lowering.graph.passes.schedule_overlap import Milliseconds
from legoai.lowering.graph.step.sharding import Unit
from legoai.lowering.graph.step.step_graph import StepGraph

HOP_BYTES: Final = 135_000
"""Bytes that cross a link in the time that a hop adds: 50 GB/s and 2.7 µs of InfiniBand NDR, as the catalogue has them.
They matter only to the order of gathers over groups of different sizes; over one group smaller ones come first anyway.
"""


@dataclass(frozen=True, slots=True)
class Gathered:
    """The all-gathers of a unit.

    Attributes:
        unit: whose parameters they gather.
        forward: of the first read.
        backward: repeated ones; none where it stays unsharded after forward.
    """

    unit: Unit
    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]

    def time_per_byte(self, milliseconds: Milliseconds | None) -> float:
        """Return the all-gathers' time per gathered byte; if unknown, that of a ring with unit time per byte."""
        time = size = 0.0
        for gather in self.forward:
            collective: Any = gather.start[-1]
            ranks, bytes = int(collective.args[1]), collective.meta["val"].nbytes
            known = None if milliseconds is None else milliseconds(collective, None)
            time += (ranks - 1) * (HOP_BYTES + bytes / ranks) if known is None else known
            size += bytes
        return time / size


def unshard_selectively(
    graph: StepGraph, *, limit: int, moments: int = 0, milliseconds: Milliseconds | None = None
) -> None:
    """Leave out the all-gathers of units that can stay unsharded.

    Args:
        graph: whose all-gathers have their final places.
        limit: of the device's memory, which no unit that stays may exceed.
        moments: values per element of a parameter that the optimizer keeps on the device.
        milliseconds: of all-gathers, equal on all ranks; None for those of a ring.
    """
    curve, life = held(graph, moments), lives(graph)
    several = graph.micro_batches > 1
    last_first = reversed(_gathered_units(graph))  # of equal units, the one that backward frees first
    for found in sorted(last_first, key=lambda item: item.time_per_byte(milliseconds), reverse=True):
        if not found.backward and not (several and found.unit.reshard_after_backward):
            continue
        with_unit = with_changes(curve, _changes(found, life, len(curve), throughout=several))
        if any(now > before and now > limit for before, now in zip(curve, with_unit, strict=True)):
            continue
        curve = with_unit
        _stay(graph, found)
        stays = replace(found.unit, reshard_after_forward=False)
        stays = replace(stays, reshard_after_backward=stays.reshard_after_backward and not several)
        graph.units = tuple(stays if unit is found.unit else unit for unit in graph.units)


def with_changes(curve: Sequence[int], changes: Sequence[Life]) -> list[int]:
    """Return a memory curve with additional lifetimes; lifetimes that end have negative bytes."""
    difference = [0] * (len(curve) + 1)
    for first, last, size in changes:
        difference[first] += size
        difference[last + 1] -= size
    return [before + change for before, change in zip(curve, accumulate(difference), strict=False)]


def _gathered_units(graph: StepGraph) -> list[Gathered]:
    """Return the units with all-gathers, in the order of forward's waits."""
    unit_of = {name: unit for unit in graph.units for name in unit.parameters}
    names = {node: name for name, node in graph.inputs().items()}
    found: dict[int, tuple[list[Collective], list[Collective]]] = {}
    units = []
    for index, gathers in enumerate(gathers_of(graph)):
        for gather in gathers:
            unit = unit_of[names[_shards(gather)[0]]]
            if id(unit) not in found:
                units.append(unit)
            found.setdefault(id(unit), ([], []))[index].append(gather)
    return [Gathered(unit, *map(tuple, found[id(unit)])) for unit in units]


def _changes(found: Gathered, life: Mapping[fx.Node, Life], end: int, *, throughout: bool) -> list[Life]:
    """Return the lifetimes that are added and removed if a unit stays unsharded."""
    changes = []
    again = {shard: node for gather in found.backward for shard, node in _parameters(gather).items()}
    for gather in found.forward:
        for shard, node in _parameters(gather).items():
            first, last, size = life[node]
            changes.append(Life(first, last, -size))
            if shard in again:
                begin, last, _ = life[again[shard]]
                changes.append(Life(begin, last, -size))
            changes.append(Life(0, end - 1, size) if throughout else Life(first, last, size))
    for gather in found.backward:
        first, last, size = life[gather.wait[0]]
        changes.append(Life(first, last, -size))
    return changes


def _stay(graph: StepGraph, found: Gathered) -> None:
    """Let backward read the parameters that forward has gathered."""
    kept = {shard: node for gather in found.forward for shard, node in _parameters(gather).items()}
    for gather in found.backward:
        for shard, node in _parameters(gather).items():
            node.replace_all_uses_with(kept[shard])
        made = made_of(gather.wait[0])
        for node in reversed([node for node in graph.graph.nodes if node in made]):
            graph.graph.erase_node(node)
        for node in reversed(gather.start):
            graph.graph.erase_node(node)


def _shards(gather: Collective) -> list[fx.Node]:
    """Return the placeholders of the shards that a bucket gathers, in the order of its buffer."""
    return [source for node in gather.start for source in node.all_input_nodes if source.op == "placeholder"]


def _parameters(gather: Collective) -> dict[fx.Node, fx.Node]:
    """Return the node of each gathered parameter, by the placeholder of its shard."""
    made, found = made_of(gather.wait[0]), {}
    [rows] = gather.wait[0].users
    [parts] = rows.users
    shards = _shards(gather)
    for node in parts.users:
        part: Any = node.args[1]
        last = node
        while inner := [user for user in last.users if user in made]:
            [last] = inner
        found[shards[part]] = last
    return found
