"""Open nodes: bounds from the answers of one hole."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from legoai.cost.search.branch_and_bound.nodes import Nodes
from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.candidates import Choices, order_of
from legoai.cost.search.joint.holes import divisible
from legoai.cost.search.objective import Costs, objective_of
from legoai.cost.search.result import SearchResult
from legoai.cost.search.state import SearchState
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import Candidate, OpenPlan
from legoai.dsl.open_rules import with_open_rules
from legoai.specs.directives.hole import Hole
from support.marks import NEEDS_SOLVER

TEXT = """\
plan test
model   llama3("tiny")
cluster cpu(devices = 4)
batch   (global = 32, micro = auto in [2, 4, 8], seq_len = 128)
mesh    (dp_shard = 4)
fsdp on dp_shard { layers.* = unit(reshard = auto in [after_forward, after_backward]), root = unit }
"""


class OfMicroBatches:
    """Bounds that know a candidate by its micro batch alone; None excludes it."""

    def __init__(self, known: dict[int, float | None]) -> None:
        self.known = known
        self.bounds = BoundsOf()

    def bounded(self, candidate: Candidate, least: float) -> float | None:
        size: Any = candidate.plan.batch.micro_batch
        found = least if isinstance(size, Hole) else self.known[size]
        return None if found is None else max(least, found)


@pytest.mark.parametrize(
    ("known", "raised"),
    [({2: 5.0, 4: None, 8: 3.0}, 3.0), ({2: 5.0, 4: 1.0, 8: 3.0}, 1.0), ({2: None, 4: None, 8: None}, None)],
)
def test_node_bound_is_the_best_answer_of_a_hole(known: dict[int, float | None], raised: float | None):
    plan = OpenPlan(lint(TEXT, "test.plan", directory=Path()), directory=Path())
    found, nothing = SearchResult(total=6), (None,) * len(plan.holes)
    costs: Any = OfMicroBatches(known)
    nodes = Nodes(SearchState(plan=plan, costs=costs, found=found))
    node = (1.0, len(nothing), nothing)
    assert nodes.tightened(node) is (raised != 1.0)
    assert [least for least, *_ in nodes.heap] == ([] if raised in (None, 1.0) else [raised])
    assert found.bounded == (6 if raised is None else 0)
    assert not nodes.tightened(node)  # nothing was learnt since


def test_node_without_a_bound_is_not_counted_as_excluded():
    plan = OpenPlan(lint(TEXT, "test.plan", directory=Path()), directory=Path())
    found, nothing = SearchResult(total=6), (None,) * len(plan.holes)
    costs: Any = OfMicroBatches(dict.fromkeys((2, 4, 8), -math.inf))
    nodes = Nodes(SearchState(plan=plan, costs=costs, found=found))
    assert not nodes.tightened((-math.inf, len(nothing), nothing))
    assert found.bounded == 0


STYLED = """\
plan test
model   llama3("tiny")
cluster cpu(devices = 4)
batch   (global = 32, micro = 2, seq_len = 128)
mesh    (dp_shard = rest, tp = auto in [1, 2])
shard auto on tp
fsdp blocks on dp_shard
"""


@NEEDS_SOLVER
def test_unchosen_styles_are_skipped_except_for_one_rank():
    linted = with_open_rules(lint(STYLED, "test.plan", directory=Path()), directory=Path())
    plan, found = OpenPlan(linted, directory=Path()), SearchResult(total=0)
    nodes = Nodes(SearchState(plan=plan, costs=Costs(objective_of(None), BoundsOf()), found=found))
    [ranks] = [index for index, hole in enumerate(plan.holes) if hole.what == "mesh tp"]
    one, two = (tuple(value if index == ranks else None for index in range(len(plan.holes))) for value in (0, 1))
    others = nodes.below(one) - 1
    nodes.push(one, plan.candidate(one), 1.0)
    assert not nodes.untried
    assert (found.bounded, found.left_out) == (others, 0)
    nodes.expand((1.0, 1, two))
    assert nodes.untried == {two: 1.0}
    assert (found.bounded, found.left_out) == (others, others)
    assert all(None not in choices for _, _, choices in nodes.heap)
    assert len(nodes.heap) == 2


STAGED = """\
plan test
model   llama3("tiny", n_layers = 4)
cluster cpu(devices = 4)
batch   (global = 32, micro = 2, seq_len = 128)
mesh    (pp = auto in [1, 2], dp_shard = rest, tp = auto in [1, 2])
shard auto on tp
pipeline on pp (schedule = auto in [GPipe, 1F1B])
fsdp blocks on dp_shard
"""


def test_nodes_with_stages_or_open_styles_take_longer():
    linted = with_open_rules(lint(STAGED, "test.plan", directory=Path()), directory=Path())
    plan = OpenPlan(linted, directory=Path())
    nodes = Nodes(SearchState(plan=plan, costs=Costs(objective_of(None), BoundsOf())))

    def effort(**answers: int) -> int:
        names = [hole.what.split()[-1] if hole.line is None else "style" for hole in plan.holes]
        choices = tuple(answers.get(name) for name in names)
        return nodes.effort((0.0, 0, choices))

    alone = effort()
    assert effort(pp=0) == alone  # one rank
    assert effort(pp=1) > alone
    assert effort(pp=1, tp=1, schedule=0) > effort(pp=1)  # only styles are left


def test_one_treatment_bounds_no_division():
    """The bound of a node with a decided treatment is not one of divisions between it and others."""
    text = STYLED.replace("shard auto on tp\nfsdp blocks on dp_shard", "fsdp on dp_shard { layers.* = auto }")
    text += "checkpoint { layers.* = auto }"
    plan = OpenPlan(lint(text, "test.plan", directory=Path()), directory=Path())
    holes = divisible(plan)
    assert len(holes) == 2
    first = next(hole for hole in order_of(plan.holes) if hole in holes)
    nodes = Nodes(SearchState(plan=plan, costs=Costs(objective_of(None), BoundsOf())), holes)
    group: Choices = tuple(None if hole in holes else 0 for hole in range(len(plan.holes)))
    nodes.expand((1.0, 2, group))
    assert nodes.untried == {group: 1.0}
    nodes.expand((5.0, 1, tuple(0 if hole == first else value for hole, value in enumerate(group))))
    assert nodes.untried == {group: 1.0}
