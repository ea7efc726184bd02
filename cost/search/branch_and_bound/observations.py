"""Observations of a simulated candidate for others: bounds of what is not tried, splits into stages, and buckets."""

from __future__ import annotations

import math
from dataclasses import dataclass

from legoai.cost.search.branch_and_bound.nodes import Nodes, split_of
from legoai.cost.search.branch_and_bound.unrecomputed import recomputes_nothing
from legoai.cost.search.buckets.solved import bucketings
from legoai.cost.search.candidate_bounds.bounds import Bounds
from legoai.cost.search.candidate_bounds.shortfalls import all_but_treatments
from legoai.cost.search.candidates import Choices
from legoai.cost.search.evaluation.evaluator import Figures
from legoai.cost.search.lower_bounds.observed.blocks import keeps_on_device
from legoai.cost.search.state import SearchState
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.stages.pipeline import treats_stages_apart
from legoai.dsl.open_plan import Candidate


@dataclass(frozen=True, slots=True)
class Observations:
    """Notes of the simulated candidates of one search.

    Args:
        state: of the search; solved buckets are noted in it.
        nodes: that are open.
    """

    state: SearchState
    nodes: Nodes

    def note_blocks(self, candidate: Candidate, outcome: Figures) -> None:
        """Note what the blocks and the step of a candidate took, for the bounds of others."""
        if candidate.analysis is None:
            return
        self.state.bounds.observe(candidate.analysis, outcome.micro_batch, outcome.moved, outcome.points)
        self.state.bounds.shortfalls.observe(candidate.analysis, outcome.micro_batch, outcome.step_time)
        if not treats_stages_apart(candidate.analysis):
            self.state.bounds.shared.observe_blocks(candidate.analysis, outcome.stages.least)

    def bound_others(self, choices: Choices, candidate: Candidate, outcome: Figures) -> None:
        """Bound other splits and treatments by what one took, and add better splits and buckets to those tried."""
        if candidate.analysis is None:
            return
        if candidate.plan.pipeline is not None and not treats_stages_apart(candidate.analysis):
            self._bound_splits(choices, candidate, candidate.analysis, outcome)
        if any(one.buckets for one in self.state.plan.holes):
            self._solve_buckets(choices, candidate.analysis, outcome)
        self.bound_treatments(choices, candidate, outcome)

    def bound_treatments(self, choices: Choices, candidate: Candidate, outcome: Figures) -> None:
        """Bound all answers of the holes that decide memory beside the others."""
        if not self.nodes.divided or candidate.analysis is None:
            return
        group = self.nodes.group(choices)
        opened = self.state.candidate(group).analysis or candidate.analysis
        seconds = self.state.bounds.whatever_is_recomputed(candidate.analysis, opened, outcome.stages)
        fastest = recomputes_nothing(candidate.analysis) and keeps_on_device(candidate.analysis)
        if fastest and all_but_treatments(opened) is not None:
            seconds = max(seconds, outcome.step_time)
        self.nodes.bound_untried_anew(group, self.state.costs.least(Bounds(step_time=seconds), candidate))

    def _bound_splits(self, choices: Choices, candidate: Candidate, analysis: Analysis, outcome: Figures) -> None:
        """Bound all splits into stages, and assign blocks to stages anew; blocks must have one treatment."""
        for hole, one in enumerate(self.state.plan.holes):
            if one.assigns:
                others = (*choices[:hole], None, *choices[hole + 1 :])
                seconds = self.state.bounds.of_every_split(analysis, outcome.stages)
                self.nodes.bound_untried_anew(others, self.state.costs.least(Bounds(step_time=seconds), candidate))
                found = self.state.bounds.better_split(analysis, outcome.stages)
                self.nodes.add(choices, hole, split_of(found), -math.inf)

    def _solve_buckets(self, choices: Choices, analysis: Analysis, outcome: Figures) -> None:
        """Solve for buckets by what units took."""
        machine, room = self.state.bounds.machine(analysis), self.state.bounds.room(analysis)
        found = list(bucketings(analysis, outcome.units, machine, room))
        self.state.found.bucketings[choices] = found
        for hole, one in enumerate(self.state.plan.holes):
            texts = [text for item in found if one.buckets and one.span.is_inside(item.span) for text in item.texts()]
            for text in texts:
                self.nodes.add(choices, hole, text, -math.inf)
