"""Other styles than the program of placements chooses first, beside those that it ignores something of."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.evaluation.evaluator import Outcome
from legoai.cost.search.placements.costs import PlacementCosts
from legoai.cost.search.placements.graph import GraphBuilder
from legoai.cost.search.placements.program import place
from legoai.cost.search.placements.styles import Placements
from legoai.cost.search.result import SearchResult
from legoai.cost.search.solve import solve
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan
from legoai.dsl.open_rules import with_open_rules
from support.marks import NEEDS_SOLVER, slow_but
from support.simulation.drawn_figures import Drawn, figures

pytestmark = NEEDS_SOLVER

TEXT = """\
plan test
model   llama3("tiny", n_layers = 2)
cluster cpu(devices = 2)
batch   (global = 8, micro = {micro}, seq_len = 128)
mesh    (tp = 2)
{shard}
precision (param = fp32, reduce = fp32)
{require}
"""
IGNORED = 1 << 30
"""Bytes that the program does not count."""


def opened(shard: str = "shard auto on tp", *, micro: str = "4", require: str = "") -> OpenPlan:
    text = TEXT.format(shard=shard, micro=micro, require=require)
    linted = with_open_rules(lint(text, "test.plan", directory=Path()), directory=Path())
    assert not linted.has_errors, linted.diagnostics
    return OpenPlan(linted, directory=Path())


class Listed(Drawn):
    """Seconds and bytes by the digest of a plan's styles; others are slow."""

    def __init__(self, known: dict[object, tuple[float, float]]) -> None:
        super().__init__(0)
        self.known = known

    def figures(self, analysis: Analysis) -> Outcome:
        seconds, size = self.known.get(styles_of(analysis), (9.0, 0.0))
        return figures(seconds * 4 / analysis.plan.batch.micro_batch, IGNORED + size)


def styles_of(analysis: Analysis) -> object:
    rules = analysis.assigned(analysis.plan.shard[0]).by_path
    return frozenset((path, str(rule.treatment)) for path, rule in rules.items())


def is_complete(found: SearchResult) -> bool:
    counted = sum(found.refused.values()) + found.bounded + found.left_out + len(found.failed)
    return found.total == counted + len(found.evaluated)


FEW = "shard standard on tp (loss_parallel) { tok_embeddings = auto, norm = auto, output = auto }"


def every_way(plan: OpenPlan) -> dict[object, tuple[float, float]]:
    """Seconds and bytes by the program's own account of every legal assignment of styles."""
    analysis = plan.analysis
    assert analysis is not None and analysis.manifest is not None
    program = Placements(plan, BoundsOf().machine)
    winners = program._winners(analysis)
    open = program._open(analysis)
    decided = {path: rule for path, rule in winners.items() if path not in open}
    costs = PlacementCosts(analysis, BoundsOf().machine(analysis))
    found: dict[object, tuple[float, float]] = {}
    for labels in itertools.product(*(range(len(hole.choices)) for hole in plan.holes)):
        candidate = plan.candidate(labels)
        rules = {hole: {label: plan.rules_of(hole)[label]} for hole, label in enumerate(labels)}
        placed = (
            None
            if candidate.errors
            else place(GraphBuilder(analysis.manifest, decided, open, rules, costs, followed=True).build())
        )
        if placed is not None and placed.seconds is not None:
            assert candidate.analysis is not None
            found[styles_of(candidate.analysis)] = 1.0 + placed.seconds, placed.bytes
    return found


@pytest.mark.slow
def test_memory_that_the_program_ignores_corrects_its_limit(monkeypatch: pytest.MonkeyPatch):
    """Under each limit the best of all styles that meet it is found, and none where none does."""
    monkeypatch.setattr(Placements, "usual", lambda *_, **__: [])
    ways = every_way(opened(FEW))
    sizes = sorted({size for _, size in ways.values()})
    first = min(ways.values())
    assert len(sizes) > 2 and first[1] > sizes[0]
    for size in (sizes[0] - 1, sizes[0], first[1] - 1, first[1]):
        limit = IGNORED + int(size)
        solution = solve(opened(FEW, require=f"require peak_memory <= {limit}B"), Listed(ways))
        meeting = [seconds for seconds, held in ways.values() if IGNORED + held <= limit]
        assert (solution.value is None) == (not meeting)
        if meeting:
            assert solution.value == pytest.approx(min(meeting), rel=1e-12)
        assert is_complete(solution.result)


FORMS = ("sequence, loss_parallel", "sequence", "loss_parallel", "")


def standard(options: str) -> object:
    analysis = opened(f"shard standard on tp ({options})" if options else "shard standard on tp").analysis
    assert analysis is not None
    return styles_of(analysis)


@pytest.mark.parametrize("form", slow_but(FORMS, "sequence, loss_parallel"))
def test_best_form_of_the_standard_layout_is_found(form: str):
    """Whatever the program ignores, no form of the standard layout is better than the solution."""
    costs = {standard(other): (2.0 if other == form else 3.0, 0.0) for other in FORMS}
    solution = solve(opened(micro="auto in [2, 4]"), Listed(costs))
    assert solution.value == 2.0
    assert solution.best is not None
    analysis = solution.plan.candidate(solution.best.choices).analysis
    assert analysis is not None and styles_of(analysis) == standard(form)
    assert is_complete(solution.result)
    assert len(solution.result.evaluated) <= 2 * (len(FORMS) + 1)
    again = solve(opened(micro="auto in [2, 4]"), Listed(costs))
    assert [item.choices for item in again.result.evaluated] == [item.choices for item in solution.result.evaluated]


def test_form_of_the_standard_layout_is_found_that_alone_meets_a_limit():
    costs = {standard(other): (3.0, 0.0 if other == "sequence" else IGNORED) for other in FORMS}
    require = f"require peak_memory <= {IGNORED + 1}B\nrequire step_time <= 4s"
    solution = solve(opened(require=require), Listed(costs))
    assert solution.best is not None and solution.value == 3.0


def test_styles_that_were_not_tried_are_not_said_to_violate():
    """A limit of any figure, where bounds exclude no styles: the diagnostic speaks of what was tried."""
    [item] = solve(opened(require="require bubble >= 50%"), Listed({})).diagnostics
    assert item.message == "no values of the holes that were tried meet `bubble >= 50%`"
    assert "styles on `tp` were tried only where they were likely to be best" in item.help
