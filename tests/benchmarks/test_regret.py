"""Regret of a ranking against measurements."""

from __future__ import annotations

import itertools
import random
import statistics
from pathlib import Path

import pytest
from benchmarks.regret import __main__ as command
from benchmarks.regret.predictions import LONG, Predictor, figures, shorter
from benchmarks.regret.ranking import (
    Configuration,
    Summary,
    by_prediction,
    by_rule,
    grouped,
    rank_correlation,
    regret,
)
from benchmarks.regret.split_steps import report as split_steps
from benchmarks.validation.predict import simulated
from benchmarks.validation.rows import Row

from support.simulation.simulated import in_a_fork

PIPELINE = """\
plan test

model llama3("8b", dim = 2048, n_layers = 4, n_heads = 16, n_kv_heads = 16, vocab_size = 1024)
cluster h100_sxm
batch (global = {sequences}, micro = 1, seq_len = 4096)
mesh (pp = 2, dp_shard = 4)
fsdp on dp_shard {{
  layers.* = unit(reshard = after_backward)
  root     = unit(reshard = after_backward)
}}
pipeline on pp (schedule = 1F1B, stages = 2)
attention flash
precision (param = bf16, reduce = fp32)
optimizer adamw(lr = 3e-4)
"""


def some(*measured: tuple[float, int, int]) -> list[Configuration]:
    """Configurations of one group by throughput, model-parallel degree and micro batch."""
    return [
        Configuration(id=f"{index}", group="a", tier="", rate=rate, model_parallel=parallel, micro_batch=micro)
        for index, (rate, parallel, micro) in enumerate(measured)
    ]


def test_regret_is_the_lost_share_of_the_best_throughput():
    group = some((100.0, 2, 1), (80.0, 1, 1), (50.0, 1, 4))
    assert regret(group, group[:1]) == 0.0
    assert regret(group, group[1:2]) == pytest.approx(0.2)
    assert regret(group, group[1:]) == pytest.approx(0.35)  # the mean of what ties
    assert regret(group, []) == 1.0


def test_rule_prefers_least_model_parallelism_then_largest_micro_batch():
    group = some((100.0, 2, 8), (80.0, 1, 1), (50.0, 1, 4), (60.0, 1, 4))
    assert [item.id for item in by_rule(group)] == ["2", "3"]


def test_rows_predicted_out_of_memory_are_not_ranked():
    group = some((100.0, 2, 8), (80.0, 1, 1))
    assert [item.id for item in by_prediction(group, {"0": 2.0, "1": 1.0})] == ["1"]
    assert [item.id for item in by_prediction(group, {"0": 2.0})] == ["0"]
    assert by_prediction(group, {}) == []


def test_small_groups_are_left_out():
    group = some((1.0, 1, 1), (2.0, 1, 1), (3.0, 1, 1))
    assert grouped(group) == {}
    assert list(grouped([*group, *some((4.0, 1, 1))])) == ["a"]


@pytest.mark.parametrize(("measured", "seconds", "wanted"), [((1, 2, 3), (3, 2, 1), 1.0), ((1, 2, 3), (1, 2, 3), -1.0)])
def test_rank_correlation_of_known_orders(measured: tuple[float, ...], seconds: tuple[float, ...], wanted: float):
    group = some(*((rate, 1, 1) for rate in measured))
    assert rank_correlation(group, {f"{i}": s for i, s in enumerate(seconds)}) == pytest.approx(wanted)


def test_rank_correlation_equals_the_squared_difference_formula():
    draw = random.Random(1)
    for size in range(3, 9):
        rates, seconds = draw.sample(range(100), size), draw.sample(range(100), size)
        group = some(*((float(rate), 1, 1) for rate in rates))
        squares = sum(
            (sum(other < rate for other in rates) - sum(other > time for other in seconds)) ** 2
            for rate, time in zip(rates, seconds, strict=True)
        )
        found = rank_correlation(group, {f"{index}": float(time) for index, time in enumerate(seconds)})
        assert found == pytest.approx(1 - 6 * squares / (size * (size**2 - 1)))


def test_rank_correlation_of_two_rows_is_undefined():
    assert rank_correlation(some((1.0, 1, 1), (2.0, 1, 1)), {"0": 1.0, "1": 2.0}) is None


def test_ninetieth_percentile_covers_nine_tenths():
    for count in range(1, 25):
        regrets = [index / 100 for index in range(count)]
        found = Summary.of(regrets)
        assert sum(value <= found.p90 for value in regrets) >= 0.9 * count
        assert sum(value < found.p90 for value in regrets) < 0.9 * count
        assert found.mean == pytest.approx(statistics.fmean(regrets))


def test_long_pipeline_is_extrapolated_from_two_shorter_ones():
    few = LONG // 2 + 1
    assert shorter(PIPELINE.format(sequences=4 * (few - 2))) is None
    micro_batches, pp, (one, two) = shorter(PIPELINE.format(sequences=4 * few)) or (0, 0, ("", ""))
    assert (micro_batches, pp) == (few, 2)
    assert "batch (global = 16, micro = 1, seq_len = 4096)" in one
    assert "batch (global = 24, micro = 1, seq_len = 4096)" in two


def on_the_line(sequences: int) -> tuple[float, float]:
    text = PIPELINE.format(sequences=sequences)
    return figures(text, long=0)["seconds"], simulated(text)["seconds"]


@pytest.mark.slow
def test_extrapolated_pipeline_time_equals_full_simulation():
    line, whole = in_a_fork(on_the_line, 4 * 17)
    assert line == pytest.approx(whole, rel=1e-3)


def test_predictor_continues_after_an_invalid_plan():
    predictor = Predictor(60.0)
    try:
        first, second = predictor("no plan"), predictor(PIPELINE.format(sequences=8).replace("cluster h100_sxm\n", ""))
        assert first.refused
        assert second.refused.startswith("lint")
        predictor.seconds = 0.0
        assert predictor(PIPELINE.format(sequences=8)).refused.startswith("no answer within")
    finally:
        predictor.close()


def test_report_counts_only_fully_predicted_groups():
    fields = {"n_gpus": "8", "tp": "1", "pp": "1", "notes": "time_tier=A"}
    rows = [
        Row(f"{model}{index}", {**fields, "model": model, "micro_batch": f"{index}", "tokens_per_s_per_gpu": f"{rate}"})
        for model, (index, rate) in itertools.product("mn", enumerate((100.0, 90.0, 80.0, 70.0)))
    ]
    kept = {
        f"m{index}": {"id": f"m{index}", "seconds": seconds, "fits": fits, "refused": ""}
        for index, (seconds, fits) in enumerate([(1.0, False), (2.0, True), (4.0, True), (3.0, None)])
    }
    found = command.report("nanotron", rows, kept, every_group=True)
    assert "| all rows | 2 | rule of thumb, as published | 30.0% | 30.0% | 0% |" in found
    assert "| tier A and B | 1 | prediction | 10.0% | 10.0% | 0% | 0.50 | 0.50 |" in found
    assert "4 rows have a prediction, 1 of them out of memory; 4 are missing" in found
    assert Path(command.RESULTS).is_dir()


def test_contenders_are_near_the_best_of_older_predictions():
    group = some((100.0, 1, 1), (90.0, 1, 1), (80.0, 1, 1))
    kept = {
        f"{index}": {"seconds": seconds, "fits": True, "code": code}
        for index, (seconds, code) in enumerate([(1.0, "new"), (1.09, "old"), (1.2, "old")])
    }
    assert command.contender(group, kept, "new", 0.1) is group[1]
    assert command.contender(group, kept, "new", 0.05) is None
    assert command.contender(group, {**kept, "1": {**kept["1"], "fits": False}}, "new", 0.1) is None
    assert command.contender(group, {}, "new", 0.1) is None


def test_stall_is_transfer_time_beyond_computation():
    fields = {
        "n_gpus": "16", "pp": "4", "grad_accum": "32", "n_params_b": "2", "global_batch": "256", "seq_len": "4096",
    }  # fmt: skip
    computed = 6 * 2e9 * 2**20 / (0.35 * 989e12 * 16) * (1 + 3 / 32)
    assert command.stall(Row("a", {**fields, "iter_time_s": f"{computed + 32 * 4 * 0.3}"})) == pytest.approx(0.3)
    assert command.stall(Row("a", {**fields, "iter_time_s": f"{computed}"})) == pytest.approx(0.0)
    assert command.stall(Row("a", {**fields, "iter_time_s": "100", "pp": "1"})) == 0.0
    assert command.stall(Row("a", {**fields, "iter_time_s": "100", "n_gpus": "8"})) == 0.0


def test_steps_are_split_into_what_they_were_composed_of():
    rows = []
    for layers, micro_batches, replicas in itertools.product((12, 16, 24), (2, 4), (1, 2, 4)):
        for tp, block, ends in ((1, 5.0, 20.0), (2, 3.0, 7.0)):
            parameters = (12 * 1024**2 * layers + 50432 * 1024 - (128 * 1024 if tp == 1 else 0)) / tp / 1e6
            after = parameters * (0.02 + 0.006 * 2 * (replicas - 1) / replicas)
            fields = {
                "n_gpus": tp * replicas, "tp": tp, "micro_batch": 2, "hidden": 1024, "n_layers": layers, "vocab": 50257,
                "grad_accum": micro_batches, "dp_replicate": replicas,
                "iter_time_s": (micro_batches * (layers * block + ends) + after) / 1e3,
            }  # fmt: skip
            rows.append(Row("row", {name: str(value) for name, value in fields.items()}))
    found = split_steps(rows)
    assert "| 1024 | 1 | 2 | 18 | 5.00 | 20.0 |\n| 1024 | 2 | 2 | 18 | 3.00 | 7.0 |" in found
    assert "36 runs, error 0.00%; update 20.0 ms for a billion parameters." in found
