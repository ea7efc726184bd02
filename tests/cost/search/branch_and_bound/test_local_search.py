"""Local search: the effects of single answers predict those of pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from legoai.cost.search.branch_and_bound import tree
from legoai.cost.search.branch_and_bound.effects import Amounts, Effects
from legoai.cost.search.branch_and_bound.tree import Search
from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.evaluation.evaluator import Outcome, OutOfTimeError
from legoai.cost.search.objective import objective_of
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan
from support.simulation.drawn_figures import Drawn, figures

STATE = 100.0


def bound(choices: Sequence[int | None]) -> Amounts:
    """Knows of the first hole that it makes all longer."""
    return Amounts(1.0 + (choices[0] or 0), STATE + 50.0, STATE + 50.0, STATE)


def test_effect_of_one_answer_adds_to_other_changes() -> None:
    effects = Effects(bound)
    effects.observe((0, 0, 0), Amounts(10.0, STATE + 60.0, STATE + 40.0, STATE))
    effects.observe((0, 1, 0), Amounts(8.0, STATE + 120.0, STATE + 60.0, STATE))
    effects.observe((0, 0, 1), Amounts(11.0, STATE + 30.0, STATE + 20.0, STATE))
    found = effects.predicted((0, 0, 0), (0, 1, 1))
    assert found is not None
    assert found.cost == pytest.approx(8.8)
    # Activations are twice and half as many; the state is there whatever is answered.
    assert (found.reserved, found.active) == pytest.approx((STATE + 60.0, STATE + 30.0))
    # And the other way round.
    back = effects.predicted((0, 1, 0), (0, 0, 1))
    assert back is not None
    assert back.cost == pytest.approx(11.0)


def test_unobserved_answer_is_predicted_from_bounds() -> None:
    effects = Effects(bound)
    effects.observe((0, 0), Amounts(10.0, STATE + 60.0, STATE + 60.0, STATE))
    effects.observe((0, 1), Amounts(5.0, STATE + 60.0, STATE + 60.0, STATE))
    found = effects.predicted((0, 0), (1, 1))
    assert found is not None
    assert found.cost == pytest.approx(10.0 * 0.5 * 2.0)


def test_excluded_answer_has_no_prediction() -> None:
    effects = Effects(lambda choices: None)
    effects.observe((0,), Amounts(1.0, 1.0, 1.0, 0.0))
    assert effects.predicted((0,), (1,)) is None


WIDE = """\
plan test
model   llama3("tiny")
cluster cpu(devices = 4)
batch   (global = 256, micro = auto in [1, 2, 4, 8, 16, 32], seq_len = 128)
mesh    (dp_shard = rest, dp_replicate = auto in [1, 2, 4])
fsdp blocks on dp_replicate, dp_shard
checkpoint { layers.* = auto in [full, every(2), every(3), none] }
loss auto
attention auto
precision (param = fp32, reduce = fp32)
"""
TREATMENTS = {"full": (1.30, 1.0), "every": (1.15, 2.0), "none": (1.0, 4.0)}
FIT = 17.0


class Tight(Drawn):
    """A large micro batch is quick, and so is little recomputation; both together do not fit.

    A step is shortest at the middle, which no way of single changes that each make it shorter leads to.
    """

    def figures(self, analysis: Analysis) -> Outcome:
        micro = analysis.plan.batch.micro_batch
        treatment = analysis.plan.checkpoint.rules[0].treatment.name
        factor, kept = TREATMENTS[treatment]
        held = micro * kept
        return figures(1e3 * factor * (1 + 0.25 / micro), 1e12 + held * 1e9, fits=held <= FIT)


class Few(Tight):
    """Stops after some candidates."""

    def evaluate(self, candidates: Sequence[Analysis], deadline: float | None) -> Iterator[Outcome]:
        if self.asked > 40:
            raise OutOfTimeError
        return super().evaluate(candidates, deadline)


@pytest.mark.slow
def test_pairs_of_answers_are_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "_MANY", 2)
    plan = OpenPlan(lint(WIDE, "test.plan", directory=Path()), directory=Path())
    total = math.prod(hole.listed for hole in plan.holes)
    found = Search(plan, bounds=BoundsOf(), evaluator=Few(0), objective=objective_of(None)).run()
    assert total > 1000 > len(found.evaluated)
    assert found.best is not None
    assert found.best.figures.step_time == pytest.approx(1e3 * (1 + 0.25 / 4))
