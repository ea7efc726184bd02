"""Integer program of placements: a strategy for each node of a module graph, such that layouts agree along its edges.

A node is a module, an operation between modules, or a change of layout, which the language also writes as a style of a
module: the cost of resharding is the cost of that node. A strategy has the layouts of a node's inputs, the layout of
its output, and a cost. Nodes of one group, such as a layer of every repeated block, have strategies with the same
label.

The program has a variable for each strategy, and a row for each edge and layout: the source has an output of that
layout if and only if the target has an input of it. Its relaxation is integral in practice. The graph is pruned first,
since building and presolving the program take most of the time: strategies that agree with no strategy of a neighbour
and dominated strategies are removed, and nodes that must have equal strategies are merged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import networkx

from legoai.runtime.linear_program import LinearProgram, Status

_UNIT: Final = 1e-6
"""Seconds per unit of the objective: solvers' tolerances suit numbers about 1."""

Group = Hashable
Label = Hashable
Forbidden = Collection[tuple[Group, Label]]
"""Labels of groups that must not all be chosen together."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to compute a node.

    Attributes:
        label: label, the same for all nodes of a group; None for a node without a group.
        takes: the layouts of the inputs, by position.
        gives: the layout of the output.
        seconds: seconds per micro batch.
        bytes: bytes held on the device.
    """

    label: Label
    takes: tuple[Hashable, ...]
    gives: Hashable
    seconds: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Node:
    """A node: its group, None where it has no style to choose, and its strategies."""

    group: Group | None
    strategies: tuple[Strategy, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Solution of a placement program.

    Attributes:
        status: status of the solver.
        labels: label of each group; empty without a solution.
        seconds: sum of seconds over the nodes; None without a solution.
        bytes: sum of bytes over the nodes.
        bound: lower bound of the seconds; None where unknown.
        variables: number of the program's variables, after pruning.
        rows: number of the program's rows, after pruning.
    """

    status: Status
    labels: Mapping[Any, Any]
    seconds: float | None
    bytes: float
    bound: float | None
    variables: int
    rows: int


class PlacementGraph:
    """Directed graph of nodes, in topological order."""

    def __init__(self) -> None:
        self.graph: networkx.MultiDiGraph = networkx.MultiDiGraph()

    def add(self, node: Node, inputs: Sequence[int] = ()) -> int:
        """Add a node with these nodes' outputs as inputs, in the order of `Strategy.takes`; return its number."""
        number = len(self.graph)
        assert all(0 <= item < number for item in inputs), "a node comes after its inputs"
        assert all(len(item.takes) == len(inputs) for item in node.strategies), "a layout for each input"
        self.graph.add_node(number, node=node)
        for position, item in enumerate(inputs):
            self.graph.add_edge(item, number, key=position)
        return number

    def nodes(self) -> dict[int, Node]:
        """Every node by its number, in order."""
        return dict(self.graph.nodes(data="node"))

    def inputs(self, number: int) -> list[int]:
        """The source nodes of a node's inputs, by position."""
        edges = sorted(self.graph.in_edges(number, keys=True), key=lambda edge: int(edge[2]))
        return [source for source, _, _ in edges]


def place(
    graph: PlacementGraph,
    *,
    forbidden: Collection[Forbidden] = (),
    most_bytes: float | None = None,
    time_limit: float | None = None,
) -> Placed:
    """Choose the strategies with the least sum of seconds whose sum of bytes is at most ``most_bytes``.

    Raises:
        SolverMissingError: PuLP or a solver is not installed.
        SolverFailedError: the solver ended without an answer.
    """
    named = {group for pairs in forbidden for group, _ in pairs}
    pruned = _pruned(graph, named, by_bytes=most_bytes is not None)
    if pruned is None:
        return Placed(status="infeasible", labels={}, seconds=None, bytes=0.0, bound=None, variables=0, rows=0)
    return _Program(pruned, forbidden, most_bytes).solve(time_limit)


def _pruned(graph: PlacementGraph, named: Collection[Group], *, by_bytes: bool) -> PlacementGraph | None:
    """An equivalent graph with fewer strategies and nodes; None where no strategies agree.

    Groups in ``named`` keep all labels that agree with their neighbours, since a cheaper one may be forbidden.
    """
    nodes = _agreeing(graph, graph.nodes())
    if nodes is None:
        return None
    members: defaultdict[Group, int] = defaultdict(int)
    for node in nodes.values():
        members[node.group] += 1
    result = PlacementGraph()
    merged: dict[tuple[object, ...], int] = {}
    numbers: dict[int, int] = {}
    for number, node in nodes.items():
        free = node.group is None or (members[node.group] == 1 and node.group not in named)
        strategies = _undominated(node.strategies, free=free, by_bytes=by_bytes)
        inputs = tuple(numbers[item] for item in graph.inputs(number))
        ways = [(None if node.group is None else item.label, item.takes) for item in strategies]
        key = (node.group, inputs, frozenset((*way, item.gives) for way, item in zip(ways, strategies, strict=True)))
        known = merged.get(key) if len(set(ways)) == len(ways) else None
        if known is None:
            numbers[number] = merged[key] = result.add(Node(node.group, strategies), inputs)
        else:  # equal inputs and labels determine the strategies of both nodes, which are equal
            numbers[number] = known
            result.graph.nodes[known]["node"] = _together(result.graph.nodes[known]["node"], strategies)
    return result


def _agreeing(graph: PlacementGraph, nodes: dict[int, Node]) -> dict[int, Node] | None:
    """The nodes with those strategies that agree with some strategy of each neighbour and each node of the group."""
    sources = {number: graph.inputs(number) for number in nodes}
    readers = {number: [(edge[1], edge[2]) for edge in graph.graph.out_edges(number, keys=True)] for number in nodes}
    nodes = dict(nodes)
    changed = True
    while changed:
        changed = False
        gives = {number: {item.gives for item in node.strategies} for number, node in nodes.items()}
        labels: dict[Group, set[Label]] = {}
        for node in nodes.values():
            if node.group is not None:
                own = {item.label for item in node.strategies}
                labels[node.group] = labels.get(node.group, own) & own
        for number, node in nodes.items():
            taken = [{item.takes[place] for item in nodes[reader].strategies} for reader, place in readers[number]]
            kept = tuple(
                item
                for item in node.strategies
                if (node.group is None or item.label in labels[node.group])
                and all(layout in gives[source] for layout, source in zip(item.takes, sources[number], strict=True))
                and all(item.gives in layouts for layouts in taken)
            )
            if not kept:
                return None
            if len(kept) < len(node.strategies):
                nodes[number] = Node(node.group, kept)
                changed = True
    return nodes


def _undominated(strategies: Sequence[Strategy], *, free: bool, by_bytes: bool) -> tuple[Strategy, ...]:
    """The strategies without dominated ones: those that cost at least as much as another with equal layouts and label.

    Labels need not be equal for a node that is ``free`` to choose its label.
    """
    alike: dict[tuple[object, ...], list[Strategy]] = {}
    for item in sorted(strategies, key=lambda one: (one.seconds, one.bytes)):
        others = alike.setdefault((item.takes, item.gives, None if free else item.label), [])
        if not others or (by_bytes and item.bytes < others[-1].bytes):
            others.append(item)
    kept = {id(item) for items in alike.values() for item in items}
    return tuple(item for item in strategies if id(item) in kept)


def _together(node: Node, others: Sequence[Strategy]) -> Node:
    """The node with the added costs of another one, which always has an equal strategy."""
    beside = {(item.label, item.takes, item.gives): item for item in others}
    added = []
    for item in node.strategies:
        other = beside[item.label, item.takes, item.gives]
        added.append(
            Strategy(item.label, item.takes, item.gives, item.seconds + other.seconds, item.bytes + other.bytes)
        )
    return Node(node.group, tuple(added))


class _Program:
    """Integer program of a graph, each of whose nodes has at least one strategy."""

    def __init__(self, graph: PlacementGraph, forbidden: Collection[Forbidden], most_bytes: float | None) -> None:
        self.program = LinearProgram()
        self.rows = 0
        self.nodes = graph.nodes()
        self.variables = {
            number: [
                self.program.variable(high=1.0, integer=True, cost=item.seconds / _UNIT) for item in node.strategies
            ]
            for number, node in self.nodes.items()
        }
        self._first: dict[Group, int] = {}
        """The first node of each group."""
        for number, node in self.nodes.items():
            self._equal(dict.fromkeys(self.variables[number], 1.0), 1.0)
            for position, source in enumerate(graph.inputs(number)):
                self._edge(source, number, position)
            if node.group is not None:
                first = self._first.setdefault(node.group, number)
                if first != number:
                    self._same(first, number)
        for pairs in forbidden:
            self._forbid(pairs)
        if most_bytes is not None:
            kept = {variable: item.bytes for variable, item in self._chosen_from(self.nodes) if item.bytes}
            largest = max([1.0, *kept.values()])
            self._at_most({variable: size / largest for variable, size in kept.items()}, most_bytes / largest)

    def _chosen_from(self, numbers: Collection[int]) -> Iterator[tuple[int, Strategy]]:
        for number in numbers:
            yield from zip(self.variables[number], self.nodes[number].strategies, strict=True)

    def _equal(self, terms: Mapping[int, float], side: float) -> None:
        self.program.equal(terms, side)
        self.rows += 1

    def _at_most(self, terms: Mapping[int, float], side: float) -> None:
        self.program.at_most(terms, side)
        self.rows += 1

    def _edge(self, source: int, target: int, position: int) -> None:
        balance: defaultdict[Hashable, dict[int, float]] = defaultdict(dict)
        for variable, item in self._chosen_from([source]):
            balance[item.gives][variable] = 1.0
        for variable, item in self._chosen_from([target]):
            balance[item.takes[position]][variable] = -1.0
        self._balance(balance)

    def _same(self, first: int, other: int) -> None:
        balance: defaultdict[Label, dict[int, float]] = defaultdict(dict)
        for sign, number in ((1.0, first), (-1.0, other)):
            for variable, item in self._chosen_from([number]):
                balance[item.label][variable] = sign
        self._balance(balance)

    def _balance(self, balance: Mapping[Hashable, Mapping[int, float]]) -> None:
        """Add a row for each key but the last: that row is redundant, since both sides choose exactly one strategy."""
        for terms in list(balance.values())[:-1]:
            self._equal(terms, 0.0)

    def _forbid(self, pairs: Forbidden) -> None:
        terms: dict[int, float] = {}
        for group, label in pairs:
            found = {
                variable: 1.0
                for variable, item in self._chosen_from([self._first[group]] if group in self._first else [])
                if item.label == label
            }
            if not found:
                return  # pruned: this label cannot be chosen
            terms |= found
        self._at_most(terms, len(pairs) - 1.0)

    def solve(self, time_limit: float | None) -> Placed:
        """Solve the program."""
        found = self.program.solve(time_limit=time_limit)
        chosen = [
            (self.nodes[number].group, item)
            for number in (self.nodes if found.values else ())
            for variable, item in self._chosen_from([number])
            if found.values[variable] > 0.5
        ]
        return Placed(
            status=found.status,
            labels={group: item.label for group, item in chosen if group is not None},
            seconds=sum(item.seconds for _, item in chosen) if chosen else None,
            bytes=sum(item.bytes for _, item in chosen),
            bound=None if found.bound is None else found.bound * _UNIT,
            variables=len(self.program),
            rows=self.rows,
        )
