"""Costs of the changes between two plans: which plans are simulated, and how the costs add up."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import legoai.cost.differences as costs
from legoai.cost.differences import CannotCompareError, CostDifference, cost_difference
from legoai.cost.profiles import shipped_file
from legoai.cost.report.differences import terminal
from legoai.cost.search.evaluation.evaluator import Figures, NoFigures, Outcome
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.differences.comparison import Comparison, Side
from legoai.dsl.differences.summary import summary as summary_of
from legoai.dsl.frontend.resolve import resolve
from legoai.dsl.lint import lint
from legoai.specs.cluster import device
from legoai.specs.device_file import text_of
from legoai.specs.plan import Plan
from support import TESTS

TEXT = """\
plan x
model   llama3("tiny", n_layers = 2)
cluster cpu(devices = 4)
batch   (global = 32, micro = 8, seq_len = 128)
mesh    (dp_shard = 4)
fsdp on dp_shard { layers.* = unit, root = unit }
checkpoint { layers.* = full }
optimizer adamw(lr = 3e-3)
schedule cosine(warmup = 20, steps = 200)
require step_time <= 1s
"""
FIGURES = Figures(
    metrics={}, fits=True, compute=1.0, recompute=0.0, exposed={}, waiting=0.0, bubble=0.0, profile="cpu@0"
)


def side(text: str, directory: Path = Path()) -> Side:
    linted = lint(text, "x.plan", directory=directory)
    assert not linted.has_errors, [item.message for item in linted.diagnostics]
    return Side(
        linted=linted,
        directory=directory,
        resolved=lambda variant: resolve(text, "x.plan", directory=directory, variant=variant),
    )


def report(comparison: Comparison, found: CostDifference) -> list[str]:
    return terminal(comparison, summary_of(comparison), found, None).splitlines()


def figures(step: float, memory: float) -> Figures:
    metrics = {
        "step_time seconds": step,
        "peak_memory bytes": memory,
        "reserved_memory bytes": 2 * memory,
        "exposed_comm seconds": step / 10,
    }
    return dataclasses.replace(FIGURES, metrics=metrics)


class Evaluations:
    """Replaces the simulator: returns figures of the test, and records its calls."""

    def __init__(self, outcome: Callable[[Plan], Outcome]) -> None:
        self.outcome = outcome
        self.asked: list[tuple[Path, Plan]] = []
        self.files: list[bool] = []

    def __call__(self, *, directory: Path, kept: dict, **_: object) -> Evaluations:
        self.directory, self.kept = directory, kept
        return self

    def __enter__(self) -> Evaluations:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def evaluate(self, candidates: Sequence[Analysis], deadline: float | None) -> Iterator[Outcome]:
        assert deadline is None
        for candidate in candidates:
            self.asked.append((self.directory, candidate.plan))
            yield self.outcome(candidate.plan)


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Plan], Outcome]], Evaluations]:
    def made(outcome: Callable[[Plan], Outcome]) -> Evaluations:
        found = Evaluations(outcome)
        monkeypatch.setattr(costs, "Simulation", found)
        monkeypatch.setattr(costs, "write_cache", lambda file, _: found.files.append(file is not None))
        return found

    return made


def modelled(plan: Plan) -> Figures:
    """Something that is no sum of its parts."""
    recomputed = plan.checkpoint is not None and any(rule.treatment.name == "full" for rule in plan.checkpoint.rules)
    step = 0.7 / plan.mesh.dp_shard * plan.batch.micro_batch * (1.3 if recomputed else 1.0) + 1e-3 / 3
    return figures(step, 1e9 * plan.batch.micro_batch / (3 if recomputed else 1))


AFTER = (
    TEXT.replace("devices = 4", "devices = 8").replace("dp_shard = 4", "dp_shard = 8").replace("micro = 8", "micro = 4")
    .replace("layers.* = full", "layers.* = none").replace("lr = 3e-3", "lr = 1e-3").replace("<= 1s", "<= 2s")
    .replace("warmup = 20", "warmup = 30").replace("plan x", "plan y")
)  # fmt: skip


def test_parts_and_interaction_sum_to_the_whole_difference(evaluations):
    asked = evaluations(modelled)
    found = cost_difference(Comparison(side(TEXT), side(AFTER)))
    rows = [[change.subject for change in part.changes] for part in found.parts]
    simulated = [row for row, part in zip(rows, found.parts, strict=True) if part.simulated]
    assert simulated == [["cluster devices", "batch micro", "mesh dp_shard"], ["checkpoint layers.*"]]
    assert len(asked.asked) == found.programs == 2 + len(simulated)
    for name in costs.FIGURES:
        added = [*(getattr(part.effect, name) for part in found.parts), getattr(found.interaction, name)]
        assert math.fsum(added) == pytest.approx(getattr(found.whole, name), rel=1e-12)
    assert found.interaction.step_time != 0.0
    assert all(part.effect == costs.Effect() for part in found.parts if not part.simulated)
    assert found.whole.peak_reserved == 2 * found.whole.peak_active


def test_device_file_is_in_the_key_of_figures(evaluations, tmp_path, monkeypatch):
    """Equal programs on devices of another memory differ in whether they fit, though their profile is the same."""
    asked, keys = evaluations(modelled), []
    monkeypatch.setattr(costs, "figures_file", keys.append)
    shutil.copy(shipped_file("h100_sxm"), tmp_path / "own.json.gz")
    text = TEXT.replace("cpu(devices = 4)", 'profile("own.toml", devices = 4)')
    for capacity in (2**36, 2**35):
        file = text_of(device("h100_sxm"), name="own", description="own", devices_per_host=4, capacity_bytes=capacity)
        (tmp_path / "own.toml").write_text(file)
        cost_difference(Comparison(side(text, tmp_path), side(text.replace("micro = 8", "micro = 4"), tmp_path)))
    assert len(asked.asked) == 4
    assert len(set(keys)) == len(keys) == 2


def test_equal_programs_are_simulated_once_without_difference(evaluations):
    asked = evaluations(modelled)
    after = f"# two lines\n\n{TEXT}".replace("checkpoint { layers.* = full }", "checkpoint { layers.{0..1} = full }")
    comparison = Comparison(side(TEXT), side(after))
    found = cost_difference(comparison)
    assert len(asked.asked) == found.programs == 2  # both plans are one, and the third recomputes nothing
    assert found.whole == costs.Effect()
    [gone, come] = found.parts
    assert (gone.simulated, come.simulated) == (True, False)
    assert found.interaction.step_time == -gone.effect.step_time
    lines = report(comparison, found)
    assert [line.split()[0] for line in lines if line.startswith("  ")][:3] == ["checkpoint", "interaction", "in"]
    assert "cost nothing: checkpoint layers.{0..1}" in lines


def test_memory_limit_costs_what_the_program_makes_of_it(evaluations):
    """With `backend = graph` a program observes it; without, the program is equal and costs the same."""

    def outcome(plan: Plan) -> Outcome:
        [limit] = plan.require
        return figures(2.0 if limit.bound < 2**24 else 1.0, limit.bound)

    asked = evaluations(outcome)
    eager = TEXT.replace("require step_time <= 1s", "require peak_memory <= 100MiB")
    graph = eager.replace("{ layers.* = unit, root = unit }", "(backend = graph) { layers.* = unit, root = unit }")
    graph = graph.replace("checkpoint { layers.* = full }", "offload (optimizer = adaptive)")
    graph = graph.replace("cpu(devices = 4)", "h100_sxm(devices = 4)")
    for text, simulated in ((eager, False), (graph, True)):
        asked.asked.clear()
        comparison = Comparison(side(text), side(text.replace("100MiB", "14MiB")))
        found = cost_difference(comparison)
        [part] = found.parts
        assert part.simulated == simulated
        assert found.programs == len(asked.asked) == 1 + simulated
        assert found.interaction == costs.Effect()
        assert (part.effect == found.whole) and (found.whole.step_time == 1.0 * simulated)
        lines = report(comparison, found)
        assert ("cost nothing: require peak_memory" in lines) != simulated
        assert not any(line.startswith("  interaction") for line in lines)


def test_part_without_figures_counts_in_the_interaction(evaluations):
    def outcome(plan: Plan) -> Outcome:
        alone = plan.batch.micro_batch == 4 and plan.checkpoint.rules[0].treatment.name == "full"
        return NoFigures(reason="it cannot be simulated") if alone else modelled(plan)

    evaluations(outcome)
    after = TEXT.replace("micro = 8", "micro = 4").replace("layers.* = full", "layers.* = none")
    found = cost_difference(Comparison(side(TEXT), side(after)))
    [micro, checkpoint] = found.parts
    assert (micro.effect, micro.reason) == (None, "it cannot be simulated")
    assert found.interaction.step_time == pytest.approx(found.whole.step_time - checkpoint.effect.step_time)


@pytest.mark.parametrize("wrong", ["before", "after"])
def test_plans_that_cannot_be_costed_are_named(evaluations, wrong: str):
    evaluations(
        lambda plan: NoFigures(reason="no speed") if (plan.name == "x") == (wrong == "before") else modelled(plan)
    )
    with pytest.raises(CannotCompareError, match=r"x\.plan cannot be costed: no speed"):
        cost_difference(Comparison(side(TEXT), side(AFTER)))
    open_plan = TEXT.replace("micro = 8", "micro = auto in [4, 8]")
    with pytest.raises(CannotCompareError, match="not decided"):
        cost_difference(Comparison(side(TEXT), side(open_plan)))
    with pytest.raises(CannotCompareError, match="unknown device"):
        cost_difference(Comparison(side(TEXT), side(AFTER)), profile="no_such_device")


def test_factory_plans_are_simulated_each_in_its_folder(evaluations, tmp_path: Path):
    asked = evaluations(modelled)
    text = TEXT.replace('llama3("tiny", n_layers = 2)', 'python("mixing_model:build")').replace("layers.*", "blocks.*")
    for name, version in (("a", ""), ("b", "# another version\n")):
        (tmp_path / name).mkdir()
        source = (TESTS / "support" / "models" / "factories.py").read_text(encoding="utf-8")
        (tmp_path / name / "mixing_model.py").write_text(source + version, encoding="utf-8")
    sides = [side(text, tmp_path / name) for name in ("a", "b")]
    comparison = Comparison(*sides)
    assert [change.what for change in comparison.changes] == ['"mixing_model.py"']
    found = cost_difference(comparison)
    assert [folder for folder, _ in asked.asked] == [tmp_path / "a", tmp_path / "b"]
    assert asked.files == [True, True]
    assert found.whole == costs.Effect()
    assert found.parts[0].simulated
