"""Solutions: their texts and baselines, and the diagnostics of searches without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.cost.report.solution import terminal, verdict
from legoai.cost.search.branch_and_bound.nodes import Nodes
from legoai.cost.search.evaluation.evaluator import NoFigures, Outcome, OutOfTimeError
from legoai.cost.search.solve import Solution, solve
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.question import solved_digest
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan
from legoai.specs.directives.require import Objective
from legoai.specs.span import Span
from support.simulation.drawn_figures import Drawn, figures
from support.simulation.searched import TEXT, opened


class Priced(Drawn):
    """Checkpointing costs time and saves memory; nothing else matters."""

    def figures(self, analysis: Analysis) -> Outcome:
        names = [rule.treatment.name for rule in analysis.plan.checkpoint.rules]
        step, memory = {"none": (1.0, 30e6), "every": (1.2, 20e6), "full": (1.4, 10e6)}[names[0]]
        return figures(step, memory, recompute=step - 1.0)


CONFLICTS = [  # of several smallest sets of two the one without the first lines is found
    ("require peak_memory <= 15MB\nrequire recompute <= 25%\nrequire step_time <= 9s\n", ["peak_memory", "recompute"]),
    ("require peak_memory <= 9MB\nrequire recompute <= 20%\n", ["peak_memory"]),
    # Leaving out one after the other would end with the last two.
    ("require peak_memory <= 9MB\nrequire recompute <= 25%\nrequire reserved_memory <= 15MB\n", ["peak_memory"]),
    (
        "require step_time <= 0.5s\nrequire peak_memory <= 15MB\nrequire recompute <= 25%\n",
        ["step_time"],
    ),
]


@pytest.mark.parametrize(("lines", "names"), CONFLICTS)
def test_only_conflicting_requirements_are_named(lines: str, names: list[str]):
    text = priced(lines)
    solution = solve(opened(text), Priced(1))
    assert solution.result.status == "infeasible"
    [item] = solution.diagnostics
    assert item.code == "LP716"
    assert [text[span.start : span.end].split()[1] for span in spans_of(item)] == names
    kept = [line for line in lines.splitlines() if line.split()[1] in names]
    for line in kept:
        fewer = "".join(f"{other}\n" for other in kept if other != line)
        assert solve(opened(text.replace(lines, fewer)), Priced(1)).best is not None


def priced(lines: str) -> str:
    text = TEXT.replace("mesh    (dp_shard = rest, tp = auto)", "mesh (dp_shard = 4)").replace(
        "micro = auto in [2, 8, 16]", "micro = 2"
    )
    return text.replace("shard standard on tp (sequence = auto)\n", "") + lines


STOPS = [
    (OutOfTimeError, "infeasible", "came to its time limit"),
    (KeyboardInterrupt, "interrupted", "was interrupted"),
]


@pytest.mark.parametrize(("error", "status", "words"), STOPS)
def test_search_for_the_smallest_set_stops_where_one_of_its_searches_is_stopped(
    error: type[BaseException], status: str, words: str
):
    """The first two searches take three candidates; the third is that without the first requirement."""

    class Stopped(Priced):
        def figures(self, analysis: Analysis) -> Outcome:
            if self.asked > 3:
                raise error
            return super().figures(analysis)

    evaluator = Stopped(1)
    text = priced("require step_time <= 9s\nrequire peak_memory <= 15MB\nrequire recompute <= 25%\n")
    solution = solve(opened(text), evaluator)
    [item] = solution.diagnostics
    assert (item.code, len(spans_of(item)), evaluator.asked) == ("LP716", 3, 4)
    assert solution.result.status == status
    assert any(words in line for line in item.help)


def test_best_figures_are_those_of_all_searches():
    """Its bound of memory excludes the candidate of least recomputation, unless memory is left out."""
    solution = solve(opened(priced("require peak_memory <= 15MB\nrequire recompute <= 10%\n")), Priced(1))
    assert len(solution.result.evaluated) == 2
    [item] = solution.diagnostics
    peak, recompute = (line for line in item.help if "simulated candidates" in line)
    assert peak.startswith("the best `peak_memory` of 3 simulated candidates is 9.54 MiB, where `<= ")
    assert recompute == "the best `recompute` of 3 simulated candidates is 0.0%, where `<= 10%` is required"


def test_best_figure_of_an_exact_requirement_is_the_nearest():
    [item] = solve(opened(priced("require step_time == 1.25s\n")), Priced(1)).diagnostics
    assert "the best `step_time` of 3 simulated candidates is 1.20 s, where `== 1.25s` is required" in item.help


def test_requirements_of_one_figure_are_told_apart():
    solution = solve(opened(priced("require recompute <= 12.5%\nrequire recompute >= 100ms\n")), Priced(1))
    verdicts = {verdict(item) for item in solution.result.evaluated}
    assert verdicts == {"violates recompute <= 12.5%", "violates recompute >= 100ms"}
    [item] = solution.diagnostics
    assert item.message == "no values of the holes meet `recompute <= 12.5%` and `recompute >= 100ms` together"
    assert [line.rpartition(", where ")[2] for line in item.help[1:]] == [
        "`<= 12.5%` is required", "`>= 100ms` is required",
    ]  # fmt: skip


def spans_of(item: Diagnostic) -> list[Span]:
    return [item.label.span, *(other.span for other in item.others)]


def test_plan_without_legal_answers_is_reported():
    text = TEXT.replace("micro = auto in [2, 8, 16]", "micro = auto").replace("global = 32", "global = 3")
    text = text.replace("tp = auto", "tp = 1")
    solution = solve(opened(text), Drawn(1))
    [item] = solution.diagnostics
    assert item.code == "LP013"
    assert "LP601" in item.help[0]


def test_plan_without_fitting_candidates_is_reported():
    class Full(Drawn):
        def figures(self, analysis):
            return figures(1.0, 2.0**40, fits=False)

    [item] = solve(opened(), Full(1)).diagnostics
    assert item.code == "LP712"


def solved(text: str, seed: int = 2) -> Solution:
    return solve(opened(text), Drawn(seed))


def test_solution_text_is_the_evaluated_plan():
    text = TEXT.replace("tp = auto)", "tp = auto)  # a comment")
    solution = solved(text)
    written = solution.text(solution.best.choices)
    linted = lint(written, "test.plan", directory=Path())
    assert not [item for item in linted.diagnostics if item.code == "LP904"]
    assert linted.plan.digest == solution.plan.candidate(solution.best.choices).plan.digest
    assert linted.plan.solved.digest == solved_digest(linted.resolution)
    assert "# a comment" in written
    again = solve(OpenPlan(linted, directory=Path()), Drawn(2))
    assert again.text(again.best.choices) == written
    present = next(item for item in again.baselines if item.name == "present values")
    assert present.found.choices == again.best.choices


@pytest.mark.parametrize("stopped", ["time_limit", "interrupted", None])
def test_the_solved_line_has_what_stopped_the_search(stopped):
    solution = solved(TEXT)
    if stopped is not None:
        solution.result.status = stopped
    written = lint(solution.text(solution.best.choices), "test.plan", directory=Path())
    assert not [item for item in written.diagnostics if item.code in ("LP107", "LP904")]
    assert written.plan.solved.stopped == stopped


def test_pinned_answers_are_plain_values():
    solution = solved(TEXT)
    text = solution.text(solution.best.choices, pinned=True)
    assert "auto" not in text
    assert "solved" not in text
    assert (
        lint(text, "test.plan", directory=Path()).plan.digest
        == solution.plan.candidate(solution.best.choices).plan.digest
    )


def test_holes_of_a_variant_are_not_pinned_with_those_of_the_plan():
    batch = "batch (global = 64, micro = auto in [2, 4] -> 4, seq_len = 128)"
    solution = solved(f"{TEXT}variant wide {{ {batch} }}\n")
    text = solution.text(solution.best.choices, pinned=True)
    assert text.count("auto") == 1 and batch in text


def test_rule_of_thumb_takes_least_degrees_and_largest_micro_batch():
    solution = solve(opened(), Priced(1))
    ruled = next(item for item in solution.baselines if item.name == "rule of thumb").found
    plan = solution.plan.candidate(ruled.choices).plan
    assert (plan.mesh.tp, plan.batch.micro_batch) == (1, 8)  # of 32 sequences on 4 ranks


def test_equal_costs_are_compared_without_their_last_digits():
    """A sum of the same kernels in another order is no better, and no bound below the best is but for rounding."""

    class Rounded(Priced):
        def figures(self, analysis: Analysis) -> Outcome:
            names = [rule.treatment.name for rule in analysis.plan.checkpoint.rules]
            step, memory = {"none": (0.1 + 0.2, 30e6), "every": (0.3, 30e6), "full": (0.1 + 0.2, 10e6)}[names[0]]
            return figures(step, memory)

    solution = solve(opened(priced("")), Rounded(1))
    assert solution.best is not None
    assert [item.figures.reserved for item in solution.ranked()] == [10e6, 30e6, 30e6]
    assert solution.best.figures.reserved == 10e6
    assert (solution.result.status, solution.gap) == ("optimal", 0.0)


@pytest.mark.parametrize(("less", "status"), [(1e-15, "optimal"), (1e-6, "bounded")])
def test_gaps_of_rounding_are_none(monkeypatch: pytest.MonkeyPatch, less: float, status: str):
    monkeypatch.setattr(Nodes, "least_untried", lambda self, below: below * (1.0 - less))
    solution = solve(opened(priced("")), Priced(1))
    assert solution.result.status == status
    assert (solution.gap == 0.0) is (status == "optimal")


class Equal(Priced):
    """Nothing is recomputed, whatever the treatment."""

    def figures(self, analysis: Analysis) -> Outcome:
        priced = super().figures(analysis)
        return figures(priced.metrics["step_time seconds"], priced.reserved)


def test_of_equal_candidates_the_one_of_least_memory_is_the_best():
    """The first is as good by the objective, which has no bound, and its least value is 0."""
    evaluator = Equal(1)
    solution = solve(opened(priced("minimize recompute\n")), evaluator)
    assert solution.best is not None and solution.result.status == "optimal" and evaluator.asked == 3
    assert solution.best.figures.reserved == min(item.figures.reserved for item in solution.result.evaluated)
    assert solution.result.bound == 0.0


@pytest.mark.parametrize(
    ("objective", "heading", "found"),
    [
        ("step_time", "recompute", "+20.0% step: 200 ms more recomputation"),
        ("peak_memory", "recompute", "+100.0% peak_memory (19.1 MiB); -14.3% step"),
        (
            "reserved_memory",
            "recompute  reserved_memory",
            "19.1 MiB         +100.0% reserved_memory (19.1 MiB); -14.3% step",
        ),
        ("recompute", "recompute", "recompute 16.7%; +20.0% step: 200 ms more recomputation"),
    ],
)
def test_candidates_are_compared_by_the_objective(objective: str, heading: str, found: str):
    solution = solve(opened(priced("")), Priced(1))  # in which no candidate is excluded by a bound
    solution.objective = Objective(direction="minimize", metric=objective)
    solution.result.best = solution.ranked()[0]
    text = terminal(solution)
    second = next(line for line in text.splitlines() if line.startswith("2  "))
    assert second.endswith(found)
    assert next(line for line in text.splitlines() if " step " in line and " bubble " in line).endswith(heading)
    assert "candidates have this" not in text


def test_a_tie_of_the_objective_is_stated():
    text = terminal(solve(opened(priced("minimize recompute\n")), Equal(1)))
    assert "3 candidates have this recompute: none of them reserves less memory" in text
    assert "same recompute; " in text


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (1, "1 candidate could not be simulated, and only its lower bound counts"),
        (2, "2 candidates could not be simulated, and only their lower bounds count"),
    ],
)
def test_candidates_without_figures_are_counted_in_words(count: int, words: str):
    solution = solve(opened(TEXT), Drawn(1))
    solution.result.failed = [((0,), "no kernel")] * count
    assert f"{words}: no kernel\n" in terminal(solution, top=1)


class Failing(Priced):
    """Blocks without recomputation, which is best, cannot be simulated."""

    def figures(self, analysis: Analysis) -> Outcome:
        names = [rule.treatment.name for rule in analysis.plan.checkpoint.rules]
        return NoFigures(reason="no kernel") if names == ["none"] else super().figures(analysis)


def test_candidate_without_figures_may_be_better_by_its_bound():
    solution = solve(opened(priced("")), Failing(1))
    assert solution.value == 1.2
    assert solution.result.status == "bounded"
    assert 0.0 < solution.result.bound < 1.2
    assert solution.text(solution.best.choices).splitlines()[-1].endswith(f"gap {solution.gap * 100:.6g}%")


def test_candidate_without_figures_or_bound_leaves_the_gap_unknown():
    solution = solve(opened(priced("minimize recompute\n")), Failing(1))
    assert (solution.result.status, solution.result.bound, solution.gap) == ("bounded", None, None)
    assert solution.text(solution.best.choices).splitlines()[-1].endswith("gap unknown")
    [first, *_] = terminal(solution).splitlines()
    assert first.endswith("no bound is known (no simulated candidate is better)")


def test_conflict_tells_of_candidates_without_figures():
    [item] = solve(opened(priced("require recompute <= 1%\n")), Failing(1)).diagnostics
    assert item.message == "no values of the holes that can be simulated meet `recompute <= 1%`"
    assert "1 candidate could not be simulated: no kernel" in item.help
