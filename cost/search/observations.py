"""What a simulated candidate shows of others: bounds of what is not tried, splits into stages, and buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from legoai.cost.search.bounds import Bounds, BoundsOf
from legoai.cost.search.buckets.solved import bucketings
from legoai.cost.search.candidates import Choices
from legoai.cost.search.evaluator import Figures
from legoai.cost.search.joint_memory import JointMemory
from legoai.cost.search.nodes import Nodes, split_of
from legoai.cost.search.objective import Costs
from legoai.cost.search.result import SearchResult
from legoai.cost.search.shortfalls import all_but_treatments
from legoai.cost.search.unrecomputed import recomputes_nothing
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.stages.pipeline import treats_stages_apart
from legoai.dsl.open_plan import Candidate, OpenPlan, inside
from legoai.specs.span import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """Notes of the simulated candidates of one search.

    Args:
        plan: with its holes.
        bounds: of its candidates.
        nodes: that are open.
        costs: of its candidates.
        found: where solved buckets are noted.
        joint: the holes that are answered jointly, if any.
        without: spans of `require` lines that are left out.
    """

    plan: OpenPlan
    bounds: BoundsOf
    nodes: Nodes
    costs: Costs
    found: SearchResult
    joint: JointMemory | None
    without: Sequence[Span]

    def note_blocks(self, candidate: Candidate, outcome: Figures) -> None:
        """Note what the blocks and the step of a candidate took, for the bounds of others."""
        if candidate.analysis is None:
            return
        self.bounds.observe(candidate.analysis, outcome.micro_batch, outcome.moved, outcome.points)
        self.bounds.shortfalls.observe(candidate.analysis, outcome.micro_batch, outcome.step_time)
        if not treats_stages_apart(candidate.analysis):
            self.bounds.shared.observe_blocks(candidate.analysis, outcome.stages.least)

    def bound_others(self, choices: Choices, candidate: Candidate, outcome: Figures) -> None:
        """Bound other splits and treatments by what one took, and add better splits and buckets to those tried."""
        if candidate.analysis is None:
            return
        if candidate.plan.pipeline is not None and not treats_stages_apart(candidate.analysis):
            self._bound_splits(choices, candidate, candidate.analysis, outcome)
        if any(one.buckets for one in self.plan.holes):
            self._solve_buckets(choices, candidate.analysis, outcome)
        self.bound_treatments(choices, candidate, outcome)

    def bound_treatments(self, choices: Choices, candidate: Candidate, outcome: Figures) -> None:
        """Bound all answers of the holes that decide memory beside the others."""
        if self.joint is None or candidate.analysis is None:
            return
        group = self.joint.holes.group(choices)
        opened = self.plan.candidate(group, without=self.without).analysis or candidate.analysis
        seconds = self.bounds.whatever_is_recomputed(candidate.analysis, opened, outcome.stages)
        if recomputes_nothing(candidate.analysis) and all_but_treatments(opened) is not None:
            seconds = max(seconds, outcome.step_time)
        self.nodes.bound_untried_anew(group, self.costs.least(Bounds(step_time=seconds), candidate))

    def _bound_splits(self, choices: Choices, candidate: Candidate, analysis: Analysis, outcome: Figures) -> None:
        """Bound all splits into stages, and assign blocks to stages anew; blocks must have one treatment."""
        for hole, one in enumerate(self.plan.holes):
            if one.assigns:
                others = (*choices[:hole], None, *choices[hole + 1 :])
                seconds = self.bounds.of_every_split(analysis, outcome.stages)
                self.nodes.bound_untried_anew(others, self.costs.least(Bounds(step_time=seconds), candidate))
                found = self.bounds.better_split(analysis, outcome.stages)
                self.nodes.add(choices, hole, split_of(found), -math.inf)

    def _solve_buckets(self, choices: Choices, analysis: Analysis, outcome: Figures) -> None:
        """Solve for buckets by what units took."""
        machine, room = self.bounds.machine(analysis), self.bounds.room(analysis)
        found = list(bucketings(analysis, outcome.units, machine, room))
        self.found.bucketings[choices] = found
        for hole, one in enumerate(self.plan.holes):
            texts = [text for item in found if one.buckets and inside(one.span, item.span) for text in item.texts()]
            for text in texts:
                self.nodes.add(choices, hole, text, -math.inf)
