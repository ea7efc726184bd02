"""Simulation of probes: while they run, nodes whose bounds they will tighten wait, and others are expanded."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from legoai.cost.search.branch_and_bound.nodes import Node, Nodes
from legoai.cost.search.branch_and_bound.observations import Observations
from legoai.cost.search.branch_and_bound.probes import Probes, with_one_micro_batch
from legoai.cost.search.candidates import Choices
from legoai.cost.search.evaluation.evaluator import Evaluator, Figures, Outcome
from legoai.cost.search.state import SearchState
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.open_plan import Candidate

_AT_ONCE: Final = 2
"""Probes that are simulated together."""
_LOOKED_AT: Final = 32
"""Nodes of least bound for which they are looked for."""


class _Running(NamedTuple):
    """Probes that are simulated together.

    Attributes:
        asked: as they were given.
        choices: the same with styles, where any are legal.
        candidates: of these.
        analyses: with one micro batch, as they are simulated.
        outcomes: of these; they are waited for.
    """

    asked: Sequence[Choices]
    choices: Sequence[Choices]
    candidates: Sequence[Candidate]
    analyses: Sequence[Analysis]
    outcomes: Iterator[Outcome]


@dataclass(slots=True, kw_only=True)
class Probing:
    """The probes of one search.

    Args:
        state: of the search.
        nodes: that are open.
        evaluator: of candidates.
        observations: what probes show of others.
        asked: what was chosen for evaluation, which shows as much.
        meanwhile: expands nodes while so many candidates are simulated.

    Attributes:
        running: those that are being simulated, in the order in which they were begun.
        awaiting: nodes whose blocks are being observed.
    """

    state: SearchState
    nodes: Nodes
    evaluator: Evaluator
    observations: Observations
    asked: set[Choices]
    meanwhile: Callable[[int], None]
    running: deque[_Running] = field(default_factory=deque)
    awaiting: list[Node] = field(default_factory=list)
    _probes: Probes = field(init=False)

    def __post_init__(self) -> None:
        """Probes of the same plan."""
        self._probes = Probes(self.state)

    def probe(self, node: Node | None) -> bool:
        """Begin to simulate probes for a node and others of least bound, and return whether there were any.

        Args:
            node: that was taken, and is opened again where there were; None where only others are left, or what is not
                tried one by one, of which all are waited for.
        """
        if node is None:
            probes = self._of_least(_AT_ONCE)
            self._begin([one for one in probes if one not in self.asked])
            self._observe_all_but(0)
            return bool(probes)
        if self.is_set_aside(node):
            return True
        own = self._probes.of(node[2])
        if own is None:
            return False
        self.awaiting.append(node)  # where the search is stopped meanwhile, it is still open
        known = self.asked | self._running
        self._begin([one for one in (own, *self._of_least(_AT_ONCE - 1)) if one not in known])
        if not self._is_awaited(node):
            heapq.heappush(self.nodes.heap, node)
            self.awaiting.remove(node)
        self._observe_all_but(1)
        return True

    def is_set_aside(self, node: Node) -> bool:
        """Set a node aside if its blocks are being observed, and say whether they are."""
        self.awaiting += [node] if (awaited := self._is_awaited(node)) else []
        return awaited

    def observe(self) -> None:
        """Wait for the probes that were begun first, note what they show of others, and reopen what awaited it."""
        probes = self.running[0]
        each = zip(probes.choices, probes.candidates, probes.analyses, probes.outcomes, strict=True)
        for choices, candidate, analysis, outcome in each:
            if isinstance(outcome, Figures):
                self.state.bounds.observe(analysis, outcome.micro_batch, outcome.moved, outcome.points)
                self.observations.bound_treatments(choices, candidate, outcome)
        self.running.popleft()
        self.nodes.reopen(self.awaiting)

    @property
    def _running(self) -> set[Choices]:
        """Those that are being simulated."""
        return {one for probes in self.running for one in probes.asked}

    def _is_awaited(self, node: Node) -> bool:
        """Whether the blocks of a node are being observed, so that more will be known of its bound."""
        return self._probes.awaited(node[2], self._running)

    def _of_least(self, most: int) -> list[Choices]:
        """Probes for the nodes of least bounds, and for what is not tried one by one, as far as they are needed."""
        probes: list[Choices] = []
        for choices in self.nodes.least(_LOOKED_AT, limit := self.state.limit):
            if len(probes) == most:
                break
            # More may be known now than when it was bounded.
            least = self.state.bounded(choices)
            probe = self._probes.of(choices) if least is not None and least < limit else None
            probes += [] if probe is None else [probe]
        return probes

    def _begin(self, probes: Sequence[Choices]) -> None:
        """Begin to simulate probes, with one micro batch each, and expand nodes meanwhile."""
        if not probes:
            return
        complete = dict.fromkeys(found for choices in probes if (found := self.nodes.styled(choices)) is not None)
        candidates = [self.state.candidate(choices) for choices in complete]
        analyses = [with_one_micro_batch(item.analysis) for item in candidates if item.analysis is not None]
        outcomes = self.evaluator.evaluate(analyses, self.state.deadline)
        self.running.append(_Running(probes, list(complete), candidates, analyses, outcomes))
        self.meanwhile(len(analyses))

    def _observe_all_but(self, last: int) -> None:
        while len(self.running) > last:
            self.observe()
