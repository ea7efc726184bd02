"""Second round of passes: the first steps of a run are measured, and the passes are applied again to the traced graph.

step 1       warms up, and allocates the optimizer's state
steps 2-4    are measured, node by node
step 5       runs the graph that the passes make with the measurements

As in the outer loop of DeepCompile (Tanaka et al. 2025, section 3). All ranks rewrite between the same two steps,
with one profile on which they agree: if ranks ordered collectives differently, they would deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

from torch import fx

from legoai.lowering.graph.measurement.nodes import Measured, NodeWatch
from legoai.lowering.graph.measurement.profile import MeasuredProfile, device_of, digest_of, hardware_of, signature
from legoai.lowering.graph.passes.compile_regions import nodes_of
from legoai.lowering.graph.passes.memory import held, memory_curve
from legoai.lowering.graph.step.operators import GATHERS, SCATTERS, SUM_OVER_REPLICAS
from legoai.lowering.graph.step.places import place_of
from legoai.lowering.graph.step.regions import Region
from legoai.lowering.graph.step.step_graph import StepGraph
from legoai.lowering.profile import Profile, Times, Transfer, keep_profile
from legoai.runtime.errors import RunErrorCode
from legoai.runtime.offloading.host_copies import HostCopies
from legoai.runtime.offloading.state_copies import StateCopies
from legoai.runtime.process_group import on_first_rank
from legoai.runtime.training.state import Notice
from legoai.specs.units import MIB

WARM_UP: Final = 1
MEASURED: Final = 3
"""Steps that are not measured, and steps that are."""

EVENT: Final = "graph_profile"


@dataclass(frozen=True, slots=True)
class Totals:
    """A graph's milliseconds if its nodes ran one after another, and its peak of living bytes."""

    compute: float
    communication: float
    bytes: int

    def values(self) -> dict[str, float]:
        """Return the totals for the metrics."""
        return {
            "compute_seconds": self.compute / 1e3,
            "communication_seconds": self.communication / 1e3,
            "peak_bytes": self.bytes,
        }


@dataclass(frozen=True, slots=True)
class Change:
    """Differences between a graph's earlier and present form, by :func:`outline`, and the number of moved nodes."""

    before: dict[str, int]
    after: dict[str, int]
    moved: int

    def words(self) -> str:
        """Return a description for the terminal."""
        counts = [
            f"{name} {count} -> {self.after[name]}" for name, count in self.before.items() if count != self.after[name]
        ]
        place = f"{self.moved} nodes stand behind others" if self.moved else "the order of nodes is the same"
        return ", ".join([*counts, place])


class SecondRound:
    """Measures the first steps of a graph, and then rewrites it.

    Args:
        graph: after its passes.
        traced: the same graph as it was traced.
        rewrite: runs the passes.
        profile: that the passes read.
    """

    def __init__(
        self, graph: StepGraph, traced: StepGraph, rewrite: Callable[[StepGraph], None], profile: MeasuredProfile
    ) -> None:
        self.watch: NodeWatch | None = None
        self._graph = graph
        self._traced = traced
        self._rewrite = rewrite
        self._profile = profile
        self._steps = 0

    def end_step(self) -> None:
        """Note the end of a step, and rewrite the graph after the last measured one."""
        self._steps += 1
        if self._steps == WARM_UP:
            self.watch = NodeWatch(device_of(self._graph))
        elif self._steps == WARM_UP + MEASURED:
            assert self.watch is not None, "nodes are measured"
            measured, self.watch = self.watch.agreed(), None
            self._graph.rounds = None
            self._graph.notices.append(_not_agreed() if measured is None else self._apply(measured))

    def _apply(self, measured: Mapping[str, Measured]) -> Notice:
        graph, profile = self._graph, self._profile
        found, path = on_first_rank(lambda: self._kept(measured))
        predicted, really = _totals(graph, measured, profile)
        before, order = outline(graph), _order(graph)
        profile.set(found)
        rewritten = self._traced
        rewritten.beyond = found.memory
        self._rewrite(rewritten)
        graph.replace(rewritten)
        change = Change(before, outline(graph), _moved(order, _order(graph)))
        return _notice(predicted, really, change, None if path is None else str(path))

    def _kept(self, measured: Mapping[str, Measured]) -> tuple[Profile, Path | None]:
        """Return the first rank's profile for all, and its file: predictions differ only in the ranks' own hosts."""
        found = profile_of(self._graph, self._traced, measured, self._profile)
        return found, keep_profile(self._profile.key(self._graph), found)


def read_notice(problem: str, profile: MeasuredProfile, graph: StepGraph) -> Notice:
    """Return the notice about a profile before the first step."""
    if profile.profile is None:
        lines = [f"warning[{RunErrorCode.PROFILE_UNUSABLE}]: {problem}; it is measured again"] if problem else []
        first, last = WARM_UP + 1, WARM_UP + MEASURED
        lines.append(
            f"profile = measured: the passes of the graph use predicted times; steps {first} to {last}, counted "
            "from where this run begins, are measured, and then they are applied again"
        )
        return Notice(lines=tuple(lines), event=EVENT, values={"source": "predicted", "problem": problem})
    path = profile.key(graph).path()
    line = f"profile = measured: the passes of the graph use what an earlier run measured, from {path}"
    return Notice(lines=(line,), event=EVENT, values={"source": "cache", "path": str(path)})


def profile_of(
    graph: StepGraph, traced: StepGraph, measured: Mapping[str, Measured], times: MeasuredProfile
) -> Profile:
    """Return the profile of a graph whose nodes were measured.

    Args:
        graph: that ran.
        traced: the same graph as it was traced.
        measured: nodes by name.
        times: predicted ones.
    """
    operators: defaultdict[str, list[Times]] = defaultdict(list)
    collectives: defaultdict[str, dict[int, list[Times]]] = defaultdict(lambda: defaultdict(list))
    for node, pair in _timed(graph, measured, times):
        transfer = times.predicted.transfer(node)
        if transfer is None:
            operators[signature(node)].append(pair)
        else:
            collectives[transfer[0]][transfer[1]].append(pair)
    return Profile(
        hardware=hardware_of(device_of(graph)),
        graph=digest_of(traced),
        operators={name: _median(found) for name, found in operators.items()},
        collectives={
            kind: tuple(Transfer(size, *_median(found)) for size, found in sorted(of_kind.items()))
            for kind, of_kind in collectives.items()
        },
        memory=dict(_beyond(graph, traced, measured, times.moments)),
    )


def _median(found: list[Times]) -> Times:
    return Times(median(item.measured for item in found), median(item.predicted for item in found))


def _timed(
    graph: StepGraph, measured: Mapping[str, Measured], times: MeasuredProfile
) -> Iterator[tuple[fx.Node, Times]]:
    """Yield the nodes that take time on the device; the time of a region is divided among its nodes as predicted."""
    for node in graph.graph.nodes:
        if node.name not in measured:
            continue
        milliseconds, region = measured[node.name].milliseconds, _region(graph.module, node)
        if region is None:
            predicted = times.predicted(node)
            if predicted is not None:
                yield node, Times(milliseconds, predicted)
            continue
        inside = [(item, times.predicted(item)) for item in region.source.module.graph.nodes]
        whole = sum(predicted or 0.0 for _, predicted in inside)
        for item, predicted in inside:
            if predicted and whole:
                yield item, Times(milliseconds * predicted / whole, predicted)


def _beyond(
    graph: StepGraph, traced: StepGraph, measured: Mapping[str, Measured], moments: int
) -> Iterator[tuple[str, int]]:
    """Yield the bytes beyond those of values, by the names of nodes of the traced graph."""
    known = {node.name for node in traced.graph.nodes}
    on_host = device_of(graph).type == "cpu"
    values = memory_curve(graph) if on_host else held(graph, moments)
    for node, size in zip(graph.graph.nodes, values, strict=True):
        if node.name not in measured:
            continue
        more = measured[node.name].bytes - size
        for name in (node.name, *nodes_of(node)):
            if name in known:
                yield name, more


def _totals(graph: StepGraph, measured: Mapping[str, Measured], times: MeasuredProfile) -> tuple[Totals, Totals]:
    """Return the predicted and the measured totals of a graph, for a micro batch that gathers."""
    sums = {True: [0.0, 0.0], False: [0.0, 0.0]}
    first = {node.name for node in graph.graph.nodes}
    for node, pair in _timed(graph, {name: item for name, item in measured.items() if name in first}, times):
        of_kind = sums[times.predicted.transfer(node) is not None]
        of_kind[0] += pair.predicted
        of_kind[1] += pair.measured
    values, beyond = held(graph, times.moments), dict(_beyond(graph, graph, measured, times.moments))
    most = [size + beyond.get(node.name, 0) for node, size in zip(graph.graph.nodes, values, strict=True)]
    return (
        Totals(sums[False][0], sums[True][0], max(values)),
        Totals(sums[False][1], sums[True][1], max(most)),
    )


def _region(module: fx.GraphModule, node: fx.Node) -> Region | None:
    if node.op != "call_module":
        return None
    region = module.get_submodule(str(node.target))
    return region if isinstance(region, Region) else None


def outline(graph: StepGraph) -> dict[str, int]:
    """Return how often a graph communicates and copies, and how many units stay unsharded."""
    nodes: list[fx.Node] = list(graph.graph.nodes)
    gathers = [place_of(node) for node in nodes if node.target in GATHERS and graph.of_unit(node)]
    forward = sum(place is not None and place.phase == "forward" for place in gathers)
    names = [getattr(node.target, "__name__", "") for node in nodes]
    return {
        "gathers": forward,
        "gathers again": len(gathers) - forward,
        "reductions": sum(node.target in (*SCATTERS, SUM_OVER_REPLICAS) and graph.of_unit(node) for node in nodes),
        "activations to host": names.count(HostCopies.to_host.__name__),
        "fragments of state to host": names.count(StateCopies.state_to_host.__name__),
        "units that stay gathered": sum(not unit.reshard_after_forward for unit in graph.units),
    }


def _order(graph: StepGraph) -> list[str]:
    return [node.name for node in graph.graph.nodes]


def _moved(before: list[str], after: list[str]) -> int:
    """Return how many nodes follow another node than before, or are new."""
    behind = dict(zip(before[1:], before, strict=False))
    return sum(behind.get(node) != last for last, node in pairwise(after))


def _not_agreed() -> Notice:
    problem = "ranks run different graphs, so that they share no profile; the passes stay as they are"
    line = f"warning[{RunErrorCode.PROFILE_UNUSABLE}]: {problem}"
    return Notice(lines=(line,), event=EVENT, values={"source": "predicted", "problem": problem})


def _notice(predicted: Totals, measured: Totals, change: Change, path: str | None) -> Notice:
    lines = [
        "profile = measured: a micro batch was predicted to compute "
        f"{predicted.compute:.2f} ms and communicate {predicted.communication:.2f} ms, with a peak of "
        f"{predicted.bytes / MIB:.1f} MiB; measured {measured.compute:.2f} ms, {measured.communication:.2f} ms and "
        f"{measured.bytes / MIB:.1f} MiB",
        f"profile = measured: the passes are applied again: {change.words()}",
    ]
    if path is None:
        lines.append("profile = measured: the cache cannot be written, so that the next run measures again")
    values: dict[str, Any] = {
        "source": "measured",
        "predicted": predicted.values(),
        "measured": measured.values(),
        "before": change.before,
        "after": change.after,
        "moved": change.moved,
        "path": path,
    }
    return Notice(lines=tuple(lines), event=EVENT, values=values)
