"""Evaluation by full simulation: each distinct program once, and cached ones not at all."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

import legoai
import legoai.cost.search.evaluation.evaluator as evaluator_module
from legoai.cost.search.evaluation.evaluator import Figures, Outcome, OutOfTimeError, Simulation, _outcome
from legoai.cost.search.evaluation.figures_cache import read_cache, write_cache
from legoai.cost.simulated.forking import may_fork
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan
from support.marks import NEEDS_SOLVER, some_slow
from support.simulation.simulated import in_a_fork

TEXT = """\
plan test
model   llama3("tiny", n_layers = 1)
cluster cpu(devices = 2)
batch   (global = 8, micro = 2, seq_len = 64)
mesh    (dp_shard = 2)
fsdp on dp_shard { layers.* = unit }
pipeline on pp (schedule = auto in [GPipe, 1F1B])
"""


def evaluated(kept: dict) -> tuple[list[Figures], int, bool]:
    """The figures of both candidates, which differ in a pipeline of one rank only."""
    plan = OpenPlan(lint(TEXT, "test.plan", directory=Path()), directory=Path())
    candidates = [plan.candidate([index]).analysis for index in range(2)]
    with Simulation(directory=Path(), workers=2, kept=kept) as evaluator:
        return list(evaluator.evaluate(candidates, None)), evaluator.simulated, may_fork()


def after_a_simulation(path: Path) -> tuple[list[Figures], int, bool]:
    legoai.estimate(path)
    return evaluated({})


def test_equal_programs_are_simulated_once_and_cached(tmp_path: Path):
    kept: dict = {}
    found, simulated, _ = evaluated(kept)
    assert found[0] == found[1]
    assert (simulated, len(kept)) == (1, 1)
    write_cache(tmp_path / "kept.json", kept)
    again, simulated, _ = evaluated(read_cache(tmp_path / "kept.json"))
    assert (again, simulated) == (found, 1)
    [figures] = kept.values()
    assert figures["metrics"]["step_time seconds"] == found[0].step_time > 0.0


BUDGETS = TEXT.replace(
    "pipeline on pp (schedule = auto in [GPipe, 1F1B])",
    "checkpoint { layers.* = budget(auto in [50%, 75%], by = ilp) }",
)


def outcomes(text: str, directory: Path) -> list[Outcome]:
    """The outcomes of both candidates of a plan."""
    plan = OpenPlan(lint(text, "test.plan", directory=directory), directory=directory)
    with Simulation(directory=directory, workers=2) as evaluator:
        return list(evaluator.evaluate([plan.candidate([index]).analysis for index in range(2)], None))


@NEEDS_SOLVER
def test_budgets_by_an_integer_program_are_simulated():
    """What a simulation writes is discarded, and the solver's output once more."""
    assert [type(one) for one in outcomes(BUDGETS, Path())] == [Figures, Figures]


def test_simulation_may_flush_what_it_writes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """As a model's own code may."""
    monkeypatch.setattr(f"{Simulation.__module__}._figures", lambda *_: print("from a model", flush=True))
    _outcome(*[None] * 6)
    assert capsys.readouterr().out == ""


def begun_before(*, asked_at_once: bool) -> tuple[list[Figures], int, int]:
    """Figures of both candidates, of which one was begun before; how many are simulated, and cached."""
    plan, kept = OpenPlan(lint(OTHERS, "test.plan", directory=Path()), directory=Path()), {}
    candidates = [plan.candidate([index]).analysis for index in range(2)]
    with Simulation(directory=Path(), workers=2, kept=kept) as evaluator:
        evaluator.begin_likely(candidates[:1])
        assert evaluator.simulated == 0
        while not asked_at_once and not all(one.done() for one in evaluator._likely.values()):
            time.sleep(0.01)
        return list(evaluator.evaluate(candidates, None)), evaluator.simulated, len(kept)


OTHERS = TEXT.replace("auto in [GPipe, 1F1B]", "GPipe").replace("micro = 2", "micro = auto in [1, 2]")


@pytest.mark.parametrize("asked_at_once", some_slow([True, False], True))
def test_candidate_that_was_begun_before_has_the_same_figures(asked_at_once: bool):
    plan = OpenPlan(lint(OTHERS, "test.plan", directory=Path()), directory=Path())
    with Simulation(directory=Path(), workers=2) as evaluator:
        alone = list(evaluator.evaluate([plan.candidate([index]).analysis for index in range(2)], None))
    found, simulated, kept = begun_before(asked_at_once=asked_at_once)
    assert found == alone
    assert found[0] != found[1]
    assert (simulated, kept) == (2, 2)


def stopped(begun: list[list[Future]], kept: dict) -> tuple[list[Outcome | None], int]:
    """The outcomes that are known of candidates whose simulations are as given when the time is over."""
    plan = OpenPlan(lint(OTHERS, "test.plan", directory=Path()), directory=Path())
    candidates = [plan.candidate([index]).analysis for index in range(2)]
    with Simulation(directory=Path(), workers=1, kept=kept) as evaluator:
        evaluator._begin = lambda *_, **__: begun.pop(0)  # type: ignore[method-assign]
        assert evaluator.finished(candidates) == [None, None]  # they were not asked for
        with pytest.raises(OutOfTimeError):
            next(evaluator.evaluate(candidates, time.monotonic()))
        return evaluator.finished(candidates), evaluator.simulated


def test_known_outcomes_are_not_behind_one_that_is_waited_for():
    figures, ended = evaluated({})[0][0], Future()
    ended.set_result(figures)
    kept: dict = {}
    assert stopped([[Future()], [Future(), ended]], kept) == ([None, figures], 1)
    assert len(kept) == 1
    assert stopped([[Future()]], kept) == ([None, figures], 1)


def test_simulations_that_end_unasked_are_kept():
    figures, kept = evaluated({})[0][0], {}
    with Simulation(directory=Path(), kept=kept) as evaluator:
        ended, failed, running = Future(), Future(), Future()
        ended.set_result(figures)
        failed.set_exception(BrokenProcessPool())
        evaluator._running |= {"ended": [running, ended], "running": [running], "failed": [failed]}
        evaluator._likely |= {"likely": ended}
        assert not kept
    assert kept == dict.fromkeys(("ended", "likely"), figures.document())


def endless(*_: object) -> Outcome:
    time.sleep(600)
    raise AssertionError


def test_one_process_is_ended_at_the_deadline_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(evaluator_module, "_outcome_of_packed", endless)
    candidate = OpenPlan(lint(TEXT, "test.plan", directory=Path()), directory=Path()).candidate([0]).analysis
    begin = time.monotonic()
    with Simulation(directory=Path(), workers=1) as evaluator:
        outcomes = evaluator.evaluate([candidate], begin + 0.5)
        with pytest.raises(OutOfTimeError):
            next(outcomes)
    assert time.monotonic() - begin < 60
    assert may_fork()


def test_nothing_is_begun_before_on_one_processor():
    plan = OpenPlan(lint(OTHERS, "test.plan", directory=Path()), directory=Path())
    with Simulation(directory=Path(), workers=1) as evaluator:
        evaluator.begin_likely([plan.candidate([0]).analysis])
        assert not evaluator._likely


def test_shared_manifest_is_pickled_once():
    plan = OpenPlan(lint(TEXT, "test.plan", directory=Path()), directory=Path())
    first, second = (plan.candidate([index]).analysis for index in range(2))
    with Simulation(directory=Path()) as evaluator:
        packed = evaluator.pack(first.manifest)
        assert pickle.loads(packed) == first.manifest
        assert evaluator.pack(second.manifest) is packed


@pytest.mark.slow
def test_process_that_has_simulated_does_not_fork(tmp_path: Path):
    path = tmp_path / "t.plan"
    path.write_text(TEXT.replace("auto in [GPipe, 1F1B]", "1F1B"), encoding="utf-8")
    found, _, forks = in_a_fork(after_a_simulation, path)
    assert not forks
    assert found == evaluated({})[0]


@pytest.mark.parametrize("damage", ["{", '{"a": {}}', "\n{}", "\udcff"])
def test_unreadable_cache_is_ignored(damage: str, tmp_path: Path):
    (tmp_path / "kept.json").write_text(damage, encoding="utf-8", errors="surrogateescape")
    assert read_cache(tmp_path / "kept.json") == {}
    write_cache(tmp_path / "kept.json", {"a": {"b": 1}})
    assert read_cache(tmp_path / "kept.json") == {"a": {"b": 1}}
    assert read_cache(None) == {}


def test_worker_process_imports_torch_only_to_simulate():
    code = (
        "import sys\n"
        "from legoai.cost.search.evaluation.workers import apart\n"
        "assert 'torch' not in sys.modules\n"
        "print(apart(lambda: 'torch' in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
