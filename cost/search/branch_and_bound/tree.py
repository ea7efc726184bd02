"""Branch and bound over the holes of a plan: partial answers are pruned by lint's own rules and by lower bounds.

A node is an answer for the first holes (:mod:`legoai.cost.search.branch_and_bound.nodes`). Nodes are taken best bound
first. Lint's rules speak of a plan with holes as far as it is decided, so that a contradiction takes the whole subtree
away. What is complete is evaluated, a fixed number of candidates at a time, so that the result does not depend on how
many processes evaluate them.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from typing import Final

from legoai.cost.search.baselines import likely_baselines
from legoai.cost.search.branch_and_bound.local_search import LocalSearch
from legoai.cost.search.branch_and_bound.neighbours import Neighbours
from legoai.cost.search.branch_and_bound.nodes import Node, Nodes
from legoai.cost.search.branch_and_bound.observations import Observations
from legoai.cost.search.branch_and_bound.other_styles import OtherStyles
from legoai.cost.search.branch_and_bound.probe_simulation import Probing
from legoai.cost.search.branch_and_bound.treatments import Treatments
from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.candidates import Choices, evaluated
from legoai.cost.search.evaluation.evaluator import Evaluator, Figures, NoFigures, Outcome, OutOfTimeError
from legoai.cost.search.joint.decision import JointMemory
from legoai.cost.search.joint.holes import divisible
from legoai.cost.search.objective import SMALL_GAP, Costs, is_timed
from legoai.cost.search.result import Progress, SearchResult
from legoai.cost.search.state import SearchState
from legoai.cost.trace.garbage import uncollected
from legoai.dsl.open_plan import Candidate, OpenPlan
from legoai.runtime.linear_program import installed
from legoai.specs.directives.require import Objective
from legoai.specs.span import Span

AT_ONCE: Final = 8
"""Candidates that are evaluated before the next are chosen: more keep more processors busy, fewer prune earlier."""

_PATIENCE: Final = 64
"""Nodes that are expanded, best bound first, before a candidate is looked for straight below one of them."""

_LONGER: Final = 16
"""Times as many, once a candidate is known that fits: then bounds exclude more in that time than a simulation would."""

_MEANWHILE: Final = 32
"""Effort that is spent on expanding nodes for each candidate that is simulated meanwhile."""

_ALONE: Final = 16
"""Times as much for a candidate that is simulated alone, beside which most machines have a processor that is idle."""

_MANY: Final = 256
"""Ways to answer all holes from which on the search begins at likely candidates, and at what lies beside the best."""


class Search:
    """One search over the answers of a plan.

    Args:
        plan: with its holes.
        bounds: of its candidates.
        evaluator: of its candidates.
        objective: what is optimised.
        without: spans of `require` lines that are left out.
        first_feasible: stop at the first feasible candidate.
        gap: share by which a better candidate need not be found; None for none where answers are few, else 0.5%.
        deadline: a time of `time.monotonic` at which to stop.
        progress: called with the state of the search.
    """

    def __init__(
        self,
        plan: OpenPlan,
        *,
        bounds: BoundsOf,
        evaluator: Evaluator,
        objective: Objective,
        without: Sequence[Span] = (),
        first_feasible: bool = False,
        gap: float | None = None,
        deadline: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        total = math.prod(hole.listed for hole in plan.holes)
        costs = Costs(objective, bounds, SMALL_GAP if gap is None else gap, exact=gap is None and total < _MANY)
        found = SearchResult(total=total)
        self.state = SearchState(plan=plan, costs=costs, without=tuple(without), deadline=deadline, found=found)
        costs.expect(None)
        self.evaluator = evaluator
        self.first_feasible = first_feasible
        self.say = progress or (lambda count, best, bound: None)
        self._expanded = 0
        """Nodes that were expanded since a candidate was chosen for evaluation."""
        self._awaited: set[str] = set()
        """What the candidates of the batch will show of others."""
        self._asked: set[Choices] = set()
        """What was chosen for evaluation."""
        joint = self._joint_memory()
        self.nodes = Nodes(self.state, self._divided(joint))
        self._treatments = None if joint is None else Treatments(self.state, joint, self.nodes)
        placed = any(hole.line is not None for hole in plan.holes)
        self._other_styles = OtherStyles(self.state, self.nodes) if placed else None
        self._observations = Observations(self.state, self.nodes)
        self._probing = Probing(
            state=self.state,
            nodes=self.nodes,
            evaluator=evaluator,
            observations=self._observations,
            asked=self._asked,
            meanwhile=self._expand_meanwhile,
        )

    def _joint_memory(self) -> JointMemory | None:
        """The holes that are answered jointly; None where there are none, or nothing would be won by it."""
        joint = JointMemory(self.state.plan)
        timed = is_timed(self.state.costs.objective)
        if not timed or not joint.holes.apply or installed() is None:
            return None
        self.state.found.joint = joint.answers
        return joint

    def _divided(self, joint: JointMemory | None) -> Set[int | None]:
        """Holes for which a division of blocks may be faster than each listed value, whether some are tried or not."""
        found: frozenset[int | None] = frozenset(() if joint is None else joint.holes.holes)
        return found | divisible(self.state.plan) if is_timed(self.state.costs.objective) else found

    def run(self) -> SearchResult:
        """Search until nothing better is left, or until the deadline or an interrupt.

        Raises:
            ProfileError: nothing is known of the speed of the devices.
            CatalogueError: a device that is not known or not complete.
        """
        found = self.state.found
        try:
            with uncollected(kept=True):  # what is known of candidates is kept, and lies in no cycles
                self._run()
        except OutOfTimeError:
            found.status = "time_limit"
        except KeyboardInterrupt:
            found.status = "interrupted"
        if found.status == "optimal" and found.best is None:
            found.status, found.untried = "infeasible", self.nodes.least_untried(math.inf) < math.inf
        stopped = found.status in ("time_limit", "interrupted")
        if stopped:
            self.nodes.raise_least(self.state.best_cost)
        bounds = [item[0] for item in self.nodes.heap]
        if found.best is not None:
            best = self.state.best_cost
            bounds += [self.nodes.least_untried(best), *self._least_without_figures()]
            if not self.state.costs.is_less(min(bounds), best):
                bounds = [best]
            elif found.status == "optimal":
                found.status = "bounded"
        if bounds and min(bounds) > -math.inf:
            found.bound = self.state.costs.value(min(bounds))
        if found.status in ("optimal", "bounded"):
            found.bounded += sum(self.nodes.below(item[2]) for item in self.nodes.heap)
        return found

    def _least_without_figures(self) -> Iterator[float]:
        """Bounds of the candidates that could not be simulated, any of which may run nevertheless."""
        for choices, _ in self.state.found.failed:
            bounded = self.state.bounded(choices)
            if bounded is not None:
                yield bounded

    def _run(self) -> None:
        nothing: Choices = (None,) * len(self.state.plan.holes)
        root = self.state.candidate(nothing)
        if root.errors:
            self.nodes.refuse(nothing, root)
            return
        self.nodes.push(nothing, root, -math.inf)
        if self.state.found.total >= _MANY:
            LocalSearch(self, Neighbours(self.state)).run()
            self._begin_baselines()
        batch: list[Node] = []
        waiting: list[Node] = []
        most = AT_ONCE
        try:
            while True:
                self.state.in_time()
                if self.first_feasible and self.state.found.best is not None:
                    return
                if self.nodes.heap and self.nodes.heap[0][0] < self.state.limit and len(batch) < most:
                    node = self._next()
                    if None in node[2]:
                        if self.nodes.bounded_anew(node) or self.nodes.tightened(node) or self._is_probed(node):
                            continue
                        self._expanded += 1
                        self.nodes.expand(node)
                    else:
                        # A candidate that was long in coming becomes the incumbent first.
                        most = 1 if self._expanded >= self._patience() else AT_ONCE
                        self._expanded = 0
                        self._choose(node, batch, waiting)
                elif batch:
                    self._evaluate(batch)
                    self.nodes.reopen(waiting)
                elif self._probing.running:
                    self._probing.observe()
                elif not (
                    self._verified()
                    or self._is_probed()
                    or self.jointly()
                    or self.restyled()
                    or self._bounded_by_others()
                ):
                    return
        finally:
            # What was chosen and not evaluated is still open, and its bound counts.
            self.nodes.reopen(batch)
            self.nodes.reopen(waiting)
            self.nodes.reopen(self._probing.awaiting)

    def _begin_baselines(self) -> None:
        """Begin to evaluate what the best candidate is compared with in the end, if it stays the best."""
        best = self.state.found.best
        if best is not None and not self.first_feasible:
            likely = likely_baselines(self.state, best.choices)
            self.evaluator.begin_likely([one.analysis for one in likely if one.analysis is not None])

    def _is_probed(self, node: Node | None = None) -> bool:
        """Simulate probes, as :meth:`Probing.probe`; other candidates come first if answers are few, or none fits."""
        return self.state.found.total >= _MANY and self.state.found.best is not None and self._probing.probe(node)

    def _expand_meanwhile(self, candidates: int) -> None:
        """Expand nodes of least bound while some candidates are simulated; complete ones stay open."""
        heap, left = self.nodes.heap, _MEANWHILE * (_ALONE if candidates == 1 else 1 + candidates)
        complete: list[Node] = []
        try:
            while left > 0 and heap and heap[0][0] < self.state.limit:
                self.state.in_time()
                node = heapq.heappop(heap)
                if None not in node[2]:
                    complete.append(node)
                    continue
                left -= self.nodes.effort(node)
                if not self._probing.is_set_aside(node) and not self.nodes.bounded_anew(node):
                    self.nodes.expand(node)
        finally:
            self.nodes.reopen(complete)

    def evaluate_early(self, chosen: Sequence[Choices]) -> None:
        """Evaluate what has an answer for each hole but those of styles, which are chosen for it."""
        ways = dict.fromkeys(found for choices in chosen for found in self.nodes.ways(choices))
        complete = [one for one in ways if one not in self._asked]
        self.nodes.early.update(one for one in complete if not self.nodes.take_in(one))
        self._evaluate([(-math.inf, 0, choices) for choices in complete])

    def _next(self) -> Node:
        """Take the node of least bound; or one of those with fewest open holes, where candidates are long in coming.

        Where many shallow nodes have a bound below that of every complete one, all of them would come first, and a
        search that is stopped in time would have nothing to show. While nothing is known to fit, other degrees and
        micro batches are looked at than those that did not, and what recomputes most, since that takes least memory.
        """
        if self._expanded < self._patience():
            return heapq.heappop(self.nodes.heap)
        below = [node for node in self.nodes.heap if node[0] < self.state.limit]
        if self.state.found.best is not None:
            node = min(below, key=lambda node: (node[1], node))
        else:
            tried = Counter(self.nodes.degrees_of(item.choices) for item in self.state.found.evaluated)
            node = min(below, key=lambda node: (tried[self.nodes.degrees_of(node[2])], node[1], -node[0], node[2]))
        self.nodes.heap.remove(node)
        heapq.heapify(self.nodes.heap)
        return node

    def _patience(self) -> int:
        return _PATIENCE if self.state.found.best is None else _LONGER * _PATIENCE

    def _choose(self, node: Node, batch: list[Node], waiting: list[Node]) -> None:
        """Choose a complete candidate for the batch, unless more is known of its bound now, or will be then."""
        if node[2] in self.nodes.early:
            return
        candidate = self.state.candidate(node[2])
        least = self.state.costs.bounded(candidate, node[0])
        if least is None:
            self.state.found.bounded += 1
        elif least > node[0]:
            heapq.heappush(self.nodes.heap, (least, *node[1:]))
        elif self._is_probed(node):
            return
        elif self._waits(candidate, batch):
            waiting.append(node)
        else:
            self._asked.add(node[2])
            batch.append(node)

    def jointly(self, *, early: bool = False) -> bool:
        """Evaluate what joint answers beside the best others need, and these; false where nothing is left of it.

        Args:
            early: before the tree has come to the answers of the holes that are decided jointly.
        """
        if self._treatments is None:
            return False
        wanted = self._treatments.jointly(early=early)
        return self._tried(wanted or (self._treatments.beside_best() if early else []), early=early)

    def restyled(self, *, early: bool = False) -> bool:
        """Evaluate other styles beside the best of other answers; false where nothing is left of it.

        Args:
            early: before the tree has come to the styles.
        """
        return self._other_styles is not None and self._tried(self._other_styles.wanted(), early=early)

    def _bounded_by_others(self) -> bool:
        """Evaluate what bounds treatments that were not tried; false where nothing is left of it."""
        return self._treatments is not None and self._tried(self._treatments.bounding(), early=False)

    def _tried(self, wanted: Sequence[Choices], *, early: bool) -> bool:
        """Evaluate candidates whatever their bounds are, and return whether there were any."""
        failed = {choices for choices, _ in self.state.found.failed}
        left = [choices for choices in wanted if choices not in self._asked and choices not in failed]
        self._evaluate([(-math.inf, 0, choices) for choices in left if self._legal(choices, early=early)])
        return bool(wanted)

    def _legal(self, choices: Choices, *, early: bool) -> bool:
        """Whether lint's rules allow a candidate that is to be evaluated whatever its bound is; it is counted so."""
        holes = zip(self.state.plan.holes, choices, strict=True)
        listed = all(index is not None and index < hole.listed for hole, index in holes)
        legal = not self.state.candidate(choices).errors
        if listed and legal and self.nodes.take_in(choices):
            return True
        if listed and early and (not legal or self.state.bounded(choices) is not None):
            self.nodes.early.update([choices] if legal else [])
        elif listed:
            self.state.found.bounded -= legal  # else a bound has excluded it, or would have
        else:
            self.state.found.total += legal
        return legal

    def _waits(self, candidate: Candidate, batch: Sequence[Node]) -> bool:
        """Whether a candidate of the batch will tighten this one's bound."""
        assert candidate.analysis is not None
        probes = self.state.bounds.unobserved(candidate.analysis)
        if not batch:
            self._awaited = set()
        waits = not self._awaited.isdisjoint(probes)
        self._awaited.update(probes)
        return waits

    def _evaluate(self, batch: list[Node]) -> None:
        """Evaluate the batch, and take out of it what is evaluated; nodes are expanded once it is under way."""
        self._asked.update(node[2] for node in batch)
        candidates = [self.state.candidate(node[2]) for node in batch]
        analyses = [item.analysis for item in candidates if item.analysis is not None]
        assert len(analyses) == len(batch)
        try:
            outcomes = self.evaluator.evaluate(analyses, self.state.deadline)
            self._expand_meanwhile(len(batch))
            for candidate, outcome in zip(candidates, outcomes, strict=True):
                self._keep(batch[0][2], candidate, outcome)
                batch.pop(0)
                self._report()
        except (OutOfTimeError, KeyboardInterrupt):
            left = slice(len(candidates) - len(batch), None)
            self._keep_finished(batch, candidates[left], self.evaluator.finished(analyses[left]))
            raise

    def _keep_finished(
        self, batch: list[Node], candidates: Sequence[Candidate], outcomes: Sequence[Outcome | None]
    ) -> None:
        """Take what is known already out of a batch that was stopped at the first candidate that was not."""
        found = self.state.found
        known = {*(item.choices for item in found.evaluated), *(choices for choices, _ in found.failed)}
        for node, candidate, outcome in zip(list(batch), candidates, outcomes, strict=True):
            choices = node[2]
            if isinstance(outcome, NoFigures) and choices not in known:
                found.failed.append((choices, outcome.reason))
            elif isinstance(outcome, Figures) and choices not in known:
                found.evaluated.append(evaluated(choices, candidate, outcome))
            if outcome is not None:
                batch.remove(node)
        self._choose_best()

    def _keep(self, choices: Choices, candidate: Candidate, outcome: Outcome) -> None:
        found = self.state.found
        if isinstance(outcome, NoFigures):
            found.failed.append((choices, outcome.reason))
            return
        self._observations.note_blocks(candidate, outcome)
        done = evaluated(choices, candidate, outcome)
        found.evaluated.append(done)
        if done.feasible and (found.best is None or self.state.costs.order(done) < self.state.costs.order(found.best)):
            found.best = done
            self.state.costs.expect(done)
        self._observations.bound_others(choices, candidate, outcome)

    def _verified(self) -> bool:
        """Simulate the best candidate whole, if that was not done, and say whether it was."""
        found = self.state.found
        if found.best is None or found.best.figures.whole:
            return False
        place = found.evaluated.index(found.best)
        candidate = self.state.candidate(found.best.choices)
        assert candidate.analysis is not None
        outcome = self.evaluator.verify(candidate.analysis, self.state.deadline)
        if isinstance(outcome, NoFigures):
            found.failed.append((found.evaluated.pop(place).choices, outcome.reason))
        else:
            found.evaluated[place] = evaluated(found.best.choices, candidate, outcome)
        self._choose_best()
        return True

    def _choose_best(self) -> None:
        found = self.state.found
        found.best = min((item for item in found.evaluated if item.feasible), key=self.state.costs.order, default=None)
        self.state.costs.expect(found.best)

    def _report(self) -> None:
        best = self.state.found.best
        least = min((node[0] for node in (*self.nodes.heap[:1], *self._probing.awaiting)), default=-math.inf)
        self.say(
            len(self.state.found.evaluated),
            None if best is None else self.state.costs.value(self.state.costs.of(best)),
            self.state.costs.value(least) if math.isfinite(least) else None,
        )
