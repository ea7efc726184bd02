"""Integer program of placements: a strategy for each node of a module graph, such that layouts agree along its edges.

A node is a module, an operation between modules, or a change of layout, which the language writes as a style of a
module too: resharding costs what the node costs that reshards. A strategy says in which layouts a node takes its
inputs, in which it gives its output, and what that costs. Nodes of one group, such as a layer of every block of a
class, take strategies with the same label.

The program has a variable for each strategy, and a row for each edge and layout: what gives the layout is chosen as
often as what takes it. Its relaxation is integral in practice. It is pruned before it is built, since building and
presolving are what takes time: strategies that no neighbour can stand beside and strategies that cost more than an
equal one are left out, and nodes that must do the same become one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import networkx

from legoai.runtime.linear_program import LinearProgram, Status

_UNIT: Final = 1e-6
"""Seconds of one unit of the objective: solvers compare costs with tolerances that suit numbers about 1."""

Group = Hashable
Label = Hashable
Forbidden = Collection[tuple[Group, Label]]
"""Labels of groups that are not all to be chosen together."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to compute a node.

    Attributes:
        label: what nodes of a group have in common; None where the node has nothing to choose.
        takes: the layouts of the inputs, by position.
        gives: the layout of the output.
        seconds: that it takes.
        bytes: that it keeps.
    """

    label: Label
    takes: tuple[Hashable, ...]
    gives: Hashable
    seconds: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Node:
    """A node: its group, None where it has nothing to choose, and its strategies."""

    group: Group | None
    strategies: tuple[Strategy, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """What solving came to.

    Attributes:
        status: of the solver.
        labels: of each group; empty where nothing was found.
        seconds: of all nodes; None where nothing was found.
        bytes: of all nodes.
        bound: no labels take fewer seconds; None where nothing is known.
        variables: of the program that was built.
        rows: of the same.
    """

    status: Status
    labels: Mapping[Any, Any]
    seconds: float | None
    bytes: float
    bound: float | None
    variables: int
    rows: int


class PlacementGraph:
    """A directed graph of nodes, each after those that its inputs come from."""

    def __init__(self) -> None:
        self.graph: networkx.MultiDiGraph = networkx.MultiDiGraph()

    def add(self, node: Node, inputs: Sequence[int] = ()) -> int:
        """Add a node that takes the outputs of these, in the order of its strategies' layouts; return its number."""
        number = len(self.graph)
        assert all(0 <= item < number for item in inputs), "a node stands behind its inputs"
        assert all(len(item.takes) == len(inputs) for item in node.strategies), "a layout for each input"
        self.graph.add_node(number, node=node)
        for position, item in enumerate(inputs):
            self.graph.add_edge(item, number, key=position)
        return number

    def nodes(self) -> dict[int, Node]:
        """Every node by its number, in order."""
        return dict(self.graph.nodes(data="node"))

    def inputs(self, number: int) -> list[int]:
        """The nodes that a node takes its inputs from, by position."""
        edges = sorted(self.graph.in_edges(number, keys=True), key=lambda edge: int(edge[2]))
        return [source for source, _, _ in edges]


def place(
    graph: PlacementGraph,
    *,
    forbidden: Collection[Forbidden] = (),
    most_bytes: float | None = None,
    time_limit: float | None = None,
) -> Placed:
    """Choose strategies that take the fewest seconds together, and keep no more than ``most_bytes``.

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

    Groups in ``named`` keep all their labels that agree, since a cheaper one may be forbidden.
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
        else:  # the same inputs and the same label leave both one choice, and the same
            numbers[number] = known
            result.graph.nodes[known]["node"] = _together(result.graph.nodes[known]["node"], strategies)
    return result


def _agreeing(graph: PlacementGraph, nodes: dict[int, Node]) -> dict[int, Node] | None:
    """The nodes with the strategies beside which each neighbour, and each other node of the group, has one."""
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
    """The strategies without those that cost no less than another with the same layouts, and label where it counts."""
    alike: dict[tuple[object, ...], list[Strategy]] = {}
    for item in sorted(strategies, key=lambda one: (one.seconds, one.bytes)):
        others = alike.setdefault((item.takes, item.gives, None if free else item.label), [])
        if not others or (by_bytes and item.bytes < others[-1].bytes):
            others.append(item)
    kept = {id(item) for items in alike.values() for item in items}
    return tuple(item for item in strategies if id(item) in kept)


def _together(node: Node, others: Sequence[Strategy]) -> Node:
    """The node with the costs of another that always does the same."""
    beside = {(item.label, item.takes, item.gives): item for item in others}
    added = []
    for item in node.strategies:
        other = beside[item.label, item.takes, item.gives]
        added.append(
            Strategy(item.label, item.takes, item.gives, item.seconds + other.seconds, item.bytes + other.bytes)
        )
    return Node(node.group, tuple(added))


class _Program:
    """The program of a graph, each of whose nodes has a strategy at least."""

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
        """A row for each but the last, which follows from the rest: one strategy is chosen on both sides."""
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
                return  # it cannot be chosen at all
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
