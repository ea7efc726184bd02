"""Simulation of probes: what stays open where a search is stopped, and what is not tried one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest

from legoai.cost.search.branch_and_bound import tree
from legoai.cost.search.branch_and_bound.probe_simulation import Probing
from legoai.cost.search.branch_and_bound.tree import Search
from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.candidates import Choices
from legoai.cost.search.evaluation.evaluator import Outcome, OutOfTimeError
from legoai.cost.search.objective import objective_of
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches
from legoai.specs.directives.batch import Batch
from legoai.specs.directives.mesh import Mesh
from support.simulation.drawn_figures import Drawn
from support.simulation.searched import SCHEDULED, opened


@pytest.mark.parametrize("seed", range(1, 4))
def test_search_stopped_while_probes_begin_leaves_all_others_open(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tree, "_MANY", 0)
    plan, begin = opened(), Probing._begin

    def stopped(self: Probing, probes: Sequence[Choices]) -> None:
        begin(self, probes)
        if probes:
            raise OutOfTimeError

    monkeypatch.setattr(Probing, "_begin", stopped)
    search = Search(plan, bounds=BoundsOf(), evaluator=Drawn(seed), objective=objective_of(None), gap=0.0)
    found = search.run()
    assert found.status == "time_limit"
    left = sum(search.nodes.below(node[2]) for node in search.nodes.heap)
    counted = sum(found.refused.values()) + found.bounded + len(found.evaluated) + len(found.failed)
    assert found.total == counted + left


def test_what_is_not_tried_one_by_one_is_probed_once(monkeypatch: pytest.MonkeyPatch):
    """Without an open node, probes are simulated for it with one micro batch, and waited for."""
    plan, evaluator = opened(SCHEDULED), Drawn(0)
    search = Search(plan, bounds=BoundsOf(), evaluator=evaluator, objective=objective_of(None), gap=0.0)
    assert search.run().best is not None
    way = tuple(0 if hole.owner is Batch or hole.owner is Mesh else None for hole in plan.holes)
    search.nodes.untried[way] = 0.0
    evaluated: list[Analysis] = []
    seen = evaluator.evaluate

    def evaluate(candidates: Sequence[Analysis], deadline: float | None) -> Iterator[Outcome]:
        evaluated.extend(candidates)
        return seen(candidates, deadline)

    monkeypatch.setattr(evaluator, "evaluate", evaluate)
    monkeypatch.setattr(search.state.bounds, "enough", math.inf)
    probing = search._probing
    probing.asked.clear()
    assert probing.probe(None)
    assert not probing.running
    assert [micro_batches(one.plan) for one in evaluated] == [1]
    assert not probing.probe(None)
