"""The result of a search is found again on disk: the same candidates, bound and counts, and joint answers."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

import legoai
from legoai.cost.estimate import estimate
from legoai.cost.profiles import shipped_file
from legoai.cost.search.evaluation.evaluator import Outcome, Simulation
from legoai.cost.search.evaluation.figures_cache import estimate_file
from legoai.cost.search.joint.decision import JointAnswers, Tried
from legoai.cost.search.results_cache import CachedResult, read_result, result_file, write_result
from legoai.cost.search.solve import Solution, devices_of, solve
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan
from legoai.lowering.program import lower
from legoai.specs.cluster import device
from legoai.specs.device_file import text_of
from support.simulation.drawn_figures import Drawn, figures
from support.simulation.simulated import in_a_fork

TEXT = """\
plan test
model   llama3("tiny")
cluster cpu(devices = 4)
batch   (global = 32, micro = auto in [2, 8, 16], seq_len = 128)
mesh    (dp_shard = rest, tp = auto)
shard standard on tp
fsdp blocks on dp_shard
checkpoint { layers.* = auto in [none, full, every(2)] }
"""


def opened(text: str = TEXT) -> OpenPlan:
    return OpenPlan(lint(text, "test.plan", directory=Path()), directory=Path())


class Limited(Drawn):
    """Figures above the bounds of each plan, which always fit, up to a maximum number."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__(seed=0)
        self.limit = limit

    def figures(self, analysis: Analysis) -> Outcome:
        draw, least = random.Random(analysis.plan.digest), self.bounds(analysis)
        return figures(least.step_time * draw.uniform(1.0, 3.0), least.memory)

    def verify(self, candidate: Analysis, deadline: float | None) -> Outcome:
        return self.figures(candidate)


def stopped_solution(text: str = TEXT) -> Solution:
    """A search that is stopped after some candidates, with joint answers."""
    solution = solve(opened(text), Limited(5))
    assert solution.result.status == "time_limit"
    assert solution.best is not None
    return solution


def cached(solution: Solution, *, seconds: float = 30.0, time_limit: float | None = 30.0) -> CachedResult | None:
    return CachedResult.of(
        solution.plan, solution.result, seconds=seconds, time_limit=time_limit, simulated=solution.simulated
    )


def test_cached_result_round_trip(tmp_path: Path):
    solution = stopped_solution()
    found, best = solution.result, solution.best
    assert best is not None
    group = (None, *best.choices[1:])
    found.joint[group] = JointAnswers(programs=2, program=Tried(choices=best.choices, predicted=1.5, found=best))
    write_result(tmp_path / "kept.json", cached(solution))
    held = read_result(tmp_path / "kept.json")
    assert held is not None
    assert held == cached(solution)
    again = held.again(opened())
    assert (again.status, again.bound, again.best) == ("time_limit", found.bound, found.best)
    assert (again.evaluated, again.failed) == (found.evaluated, found.failed)
    assert (again.total, again.bounded, again.refused) == (found.total, found.bounded, found.refused)
    assert again.joint == found.joint


def test_search_is_repeated_only_with_more_time():
    earlier = stopped_solution()
    for limit, asks in ((10.0, False), (30.0, False), (31.0, True)):
        evaluator = Limited()
        again = solve(opened(), evaluator, time_limit=limit, cached=cached(earlier))
        assert bool(evaluator.asked) is asks
        assert asks or again.value == earlier.value
        assert again.result.status == ("optimal" if asks else "time_limit")


@pytest.mark.parametrize("limit", [10.0, None])
def test_finished_search_is_never_repeated(limit: float | None, tmp_path: Path):
    earlier = solve(opened(), Limited())
    write_result(tmp_path / "kept.json", cached(earlier))
    evaluator = Limited()
    again = solve(opened(), evaluator, time_limit=limit, cached=read_result(tmp_path / "kept.json"))
    assert evaluator.asked == 0
    assert (again.result.status, again.value, again.gap) == ("optimal", earlier.value, earlier.gap)
    assert [item.name for item in again.baselines] == [item.name for item in earlier.baselines]


def test_time_dependent_results_are_not_cached():
    ended, stopped = solve(opened(), Limited()), stopped_solution()
    assert cached(ended, seconds=0.5) is None
    assert cached(stopped, time_limit=None) is None
    ended.result.status = "interrupted"
    assert cached(ended) is None


def test_cache_key_has_domains_and_requirements_but_no_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    answered = TEXT.replace("auto in [none, full, every(2)]", "auto in [none, full, every(2)] -> full")
    narrowed = TEXT.replace("auto in [none, full, every(2)]", "auto in [none, full]")
    other = TEXT.replace("global = 32", "global = 64")
    bounded, aimed = f"{TEXT}\nrequire reserved_memory <= 7GiB\n", f"{TEXT}\nmaximize mfu\n"
    asked = (TEXT, answered, narrowed, other, bounded, aimed)
    files = {text: result_file(opened(text), "profile@1") for text in asked}
    assert files[TEXT] == files[answered] is not None
    assert len(set(files.values())) == len(asked) - 1
    assert result_file(opened(), "profile@2") not in files.values()
    assert result_file(opened(), "profile@1", 0.01) not in files.values()


def test_cache_key_has_accepted_diagnostics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = "fsdp blocks on dp_shard"
    accepted, other = (TEXT.replace(place, f"{place}  # legoai: ignore[{code}]") for code in ("LP614", "LP615"))
    elsewhere = TEXT.replace("shard standard on tp", "shard standard on tp  # legoai: ignore[LP614]")
    answered = accepted.replace("every(2)]", "every(2)] -> full")
    files = [result_file(opened(text), "profile@1") for text in (TEXT, accepted, other, elsewhere, answered)]
    assert files[1] == files[-1]
    assert len(set(files)) == len(files) - 1


@pytest.mark.parametrize(
    ("lines", "others"),
    [
        (("layers.0 = a", "layers.{1, 2} = b"), ("layers.{0, 1} = a", "layers.2 = b")),
        (("layers.{0, 1} = a", "layers.2 = b"), ("layers.2 = a", "layers.{0, 1} = b")),
    ],
)
def test_cache_key_has_the_places_of_each_name(
    lines: tuple[str, str], others: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    head, _, _ = TEXT.partition("checkpoint")
    named = head.replace("model ", "let a = auto in [full, none]\nlet b = auto in [full, none]\nmodel ")
    one, other = (f"{named}checkpoint {{\n  {first}\n  {second}\n}}\n" for first, second in (lines, others))
    assert result_file(opened(one), "profile@1") == result_file(opened(one), "profile@1")
    assert result_file(opened(one), "profile@1") != result_file(opened(other), "profile@1")


def test_cache_key_has_the_places_of_holes_in_treatments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The same statement with its rules in another order: the answers of one are not in the order of the other's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rules = [f"  layers.{layer} = unit(reshard = auto)\n" for layer in (0, 1)]
    texts = [TEXT.replace("blocks on dp_shard", f"on dp_shard {{\n{a}{b}}}") for a, b in (rules, rules[::-1])]
    assert result_file(opened(texts[0]), "profile@1") != result_file(opened(texts[1]), "profile@1")


def test_damaged_result_is_ignored(tmp_path: Path):
    file = tmp_path / "kept.json"
    write_result(file, cached(stopped_solution()))
    file.write_text(file.read_text(encoding="utf-8").replace("30.0", "99.0"), encoding="utf-8")
    assert read_result(file) is None
    assert read_result(None) is read_result(tmp_path / "other.json") is None


def test_solve_reads_the_cache_unless_refreshed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`legoai.solve` reads cached results, unless `refresh` is set."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan = tmp_path / "test.plan"
    plan.write_text(TEXT, encoding="utf-8")
    solution = stopped_solution()
    asked: list[CachedResult | None] = []

    def fake(*_: object, cached: CachedResult | None, **__: object) -> Solution:
        asked.append(cached)
        return solution

    monkeypatch.setattr("legoai.cost.search.solve.solve", fake)
    for limit, refresh in ((30.0, False), (20.0, False), (20.0, True), (20.0, False)):
        legoai.solve(plan, time_limit=limit, refresh=refresh)
    assert [item and item.time_limit for item in asked] == [None, 30.0, None, 20.0]
    found = cached(solution)
    assert asked[1] is not None
    assert found is not None
    assert json.loads(json.dumps(asked[1].found)) == found.found


def test_changed_device_file_is_another_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A profile says nothing of the memory of its device: figures and results of another device file are not read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own, file = device("h100_sxm"), tmp_path / "own.toml"
    plan = tmp_path / "test.plan"
    plan.write_text(TEXT.replace("cpu(devices = 4)", 'profile("own.toml", devices = 4)'), encoding="utf-8")
    shutil.copy(shipped_file("h100_sxm"), tmp_path / "own.json.gz")
    solution, asked = stopped_solution(), []

    def fake(opened: OpenPlan, evaluator: Simulation, *, cached: CachedResult | None, **_: object) -> Solution:
        program = lower(opened.candidate([0] * len(opened.holes)).analysis)
        path = estimate_file(devices_of(opened, None), opened.analysis, program)
        asked.append((cached is not None, bool(evaluator.kept), path))
        evaluator.kept["a program"] = {}
        return solution

    monkeypatch.setattr("legoai.cost.search.solve.solve", fake)
    for capacity in (2**36, 2**36, 2**35):
        text = text_of(own, name="own", description="a test's", devices_per_host=4, capacity_bytes=capacity)
        file.write_text(text, encoding="utf-8")
        legoai.solve(plan, time_limit=20.0)
    assert [seen[:2] for seen in asked] == [(False, False), (True, True), (False, False)]
    first, again, other = (path for *_, path in asked)
    assert first == again != other


LEARNED = """\
optimizer adamw(lr = 1e-3, weight_decay = 0.1)
clip      (norm = 1.0)
schedule  cosine(warmup = 10, steps = 100)
seed      1
"""
OTHERS = (("lr = 1e-3", "lr = 2e-4"), ("norm = 1.0", "norm = 0.5"), ("warmup = 10", "warmup = 20"), ("1\n", "2\n"))


def test_cost_free_statements_are_not_in_the_cache_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = result_file(opened(TEXT + LEARNED), "profile@1")
    assert own is not None
    for old, new in (*OTHERS, ("weight_decay = 0.1", "weight_decay = 0.3")):
        assert result_file(opened(TEXT + LEARNED.replace(old, new)), "profile@1") == own, new
    for old, new in (("weight_decay = 0.1", "weight_decay = 0.0"), ("adamw", "adam"), ("cosine", "linear")):
        assert result_file(opened(TEXT + LEARNED.replace(old, new)), "profile@1") != own, new
    muon = LEARNED.replace("weight_decay = 0.1)", "weight_decay = 0.1) { layers.* = muon(lr = 1e-3, ns_steps = 5) }")
    iterated = result_file(opened(TEXT + muon), "profile@1")
    assert result_file(opened(TEXT + muon.replace("muon(lr = 1e-3", "muon(lr = 2e-3")), "profile@1") == iterated
    assert result_file(opened(TEXT + muon.replace("ns_steps = 5", "ns_steps = 9")), "profile@1") != iterated
    renamed = (TEXT + LEARNED).replace("plan test", "plan other")
    assert result_file(opened(renamed), "profile@1") == own


@pytest.mark.slow
def test_cost_free_statements_do_not_change_the_cost():
    decided = TEXT.replace("auto in [2, 8, 16]", "2").replace("tp = auto", "tp = 2") + LEARNED
    decided = decided.replace("auto in [none, full, every(2)]", "full").replace("(global = 32", "(global = 8")
    other = decided
    for old, new in OTHERS:
        other = other.replace(old, new)

    def costs() -> list[tuple[float, int, int]]:
        found = []
        for text in (decided, other):
            analysis = lint(text, "test.plan", directory=Path()).analysis
            one = estimate(lower(analysis), analysis.plan, analysis.manifest)
            found.append((one.step_time, one.peak_active, one.peak_reserved))
        return found

    own, others = in_a_fork(costs)
    assert own == others
