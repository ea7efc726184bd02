"""Baselines: the order in which the rule of thumb tries candidates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from legoai.cost.search.baselines import _by_rule, baselines, likely_baselines
from legoai.cost.search.branch_and_bound import tree
from legoai.cost.search.branch_and_bound.tree import Search
from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.candidates import Choices
from legoai.cost.search.evaluation.evaluator import Outcome
from legoai.cost.search.objective import Costs, objective_of
from legoai.cost.search.state import SearchState
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import Candidate, OpenPlan
from support.simulation.drawn_figures import Drawn, figures

HEAD = """\
plan test
model llama3("tiny", n_layers = 8, n_heads = 16, n_kv_heads = 16, dim = 256)
cluster cpu(devices = 16)
"""
BODIES = {
    "rest is sharded": """\
batch (global = 32, micro = auto, seq_len = 64)
mesh (pp = auto in [1, 2, 4], dp_replicate = auto, dp_shard = rest, tp = auto)
shard standard on tp
fsdp blocks on dp_replicate, dp_shard
pipeline on pp (schedule = auto in [1F1B, Interleaved1F1B])
""",
    "rest is tp": """\
batch (global = 32, micro = auto in [1, 2, 4], seq_len = 64)
mesh (dp_replicate = auto, dp_shard = auto, tp = rest)
shard standard on tp
fsdp blocks on dp_replicate, dp_shard
""",
    "cp is open": """\
batch (global = 32, micro = auto in [1, 2, 4], seq_len = 64)
mesh (dp_shard = rest, cp = auto in [1, 2, 4], tp = auto in [1, 2])
context on cp
shard standard on tp
fsdp blocks on dp_shard, cp
""",
}


@pytest.mark.parametrize("body", BODIES)
def test_rule_of_thumb_orders_all_legal_candidates(body: str) -> None:
    plan = OpenPlan(lint(HEAD + BODIES[body], "test.plan", directory=Path()), directory=Path())
    own = [index for index, hole in enumerate(plan.holes) if hole.what != "pipeline schedule"]
    way = tuple(None if index in own else 0 for index in range(len(plan.holes)))

    def key(choices: Sequence[int]) -> tuple[object, ...]:
        found = plan.candidate(choices).plan
        return found.mesh.tp * found.mesh.pp * found.mesh.cp, -found.batch.micro_batch, found.mesh.tp, choices

    values = (range(hole.listed) if index in own else (0,) for index, hole in enumerate(plan.holes))
    every = [choices for choices in itertools.product(*values) if not plan.candidate(choices).errors]
    linted: list[Choices] = []

    def legal(choices: Choices) -> Candidate | None:
        linted.append(choices)
        candidate = plan.candidate(choices)
        return None if candidate.errors else candidate

    found = [choices for choices, _ in _by_rule(plan, way, own, legal)]
    assert len(found) > 10
    assert found == sorted(every, key=key)
    all_of_them = len(linted)
    linted.clear()
    next(_by_rule(plan, way, own, legal))
    assert len(linted) < all_of_them / 2 or body != "rest is sharded"


def test_likely_baselines_are_the_first_that_the_rule_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    text = HEAD + BODIES["rest is sharded"]
    plan = OpenPlan(lint(text, "test.plan", directory=Path()), directory=Path())
    bounds, evaluator = BoundsOf(), Drawn(0)
    costs = Costs(objective_of(None), bounds)
    found = Search(plan, bounds=bounds, evaluator=evaluator, objective=objective_of(None)).run()
    assert found.best is not None
    costs.expect(found.best)
    expected = bounds.enough
    state = SearchState(plan=plan, costs=costs, found=found)
    likely = likely_baselines(state, found.best.choices)
    assert bounds.enough == expected < math.inf
    tried: list[Analysis] = []

    def none_fits(candidates: Sequence[Analysis], _: float | None) -> Iterator[Outcome]:
        tried.extend(candidates)
        yield from (figures(1.0, 0.0, fits=False) for _ in candidates)

    monkeypatch.setattr(evaluator, "evaluate", none_fits)
    found.evaluated.clear()
    baselines(state, evaluator)
    assert len(likely) == 4
    assert [one.plan.digest for one in tried[:4]] == [one.plan.digest for one in likely]
    assert len(tried) > len(likely)


def test_search_begins_its_baselines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "_MANY", 0)
    plan = OpenPlan(lint(HEAD + BODIES["rest is sharded"], "test.plan", directory=Path()), directory=Path())
    evaluator = Drawn(0)
    search = Search(plan, bounds=BoundsOf(), evaluator=evaluator, objective=objective_of(None), gap=0.0)
    assert search.run().best is not None
    assert len(evaluator.likely) == 4


def test_present_value_may_be_a_name() -> None:
    text = (
        f"{HEAD}let few = 2\nbatch (global = 32, micro = auto in [1, 2] -> few, seq_len = 64)\nmesh (dp_shard = 16)\n"
    )
    plan = OpenPlan(lint(f"{text}fsdp blocks on dp_shard\n", "test.plan", directory=Path()), directory=Path())
    evaluator = Drawn(0)
    search = Search(plan, bounds=BoundsOf(), evaluator=evaluator, objective=objective_of(None), gap=0.0)
    assert search.run().best is not None
    [present] = [item for item in baselines(search.state, evaluator) if item.name == "present values"]
    assert present.found is not None
    assert plan.candidate(present.found.choices).plan.batch.micro_batch == 2


def test_no_baseline_is_likely_without_open_degrees() -> None:
    text = (
        HEAD
        + """\
batch (global = 32, micro = 1, seq_len = 64)
mesh (pp = 2, dp_shard = rest)
fsdp blocks on dp_shard
pipeline on pp (schedule = auto in [GPipe, 1F1B])
"""
    )
    plan = OpenPlan(lint(text, "test.plan", directory=Path()), directory=Path())
    assert likely_baselines(SearchState(plan=plan, costs=Costs(objective_of(None), BoundsOf())), (0,)) == []
