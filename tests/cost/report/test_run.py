"""Predicted figures, compared with those of a run's metrics."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from legoai.cost.machine.cluster import machine_of
from legoai.cost.report.run import Measured, Predicted, compared, measured, note, note_cluster
from legoai.specs.directives.cluster import ClusterUse

GIB = 2**30
PREDICTED = Predicted(
    step_time_s=0.2, samples_per_step=32, tokens_per_step=8192, unit="tokens", devices=4, model_flops=4e14,
    peak_flops_per_s_per_device=1e15, profile="h100_sxm", of_this_machine=True, peak_memory_bytes=33 * GIB,
)  # fmt: skip


def step(seconds: float, *, data: float = 0.0, memory: int = 30 * GIB) -> str:
    return json.dumps({"event": "step", "seconds": seconds, "data_seconds": data, "peak_memory": memory})


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_measured_step_time_excludes_warm_up_and_data_waits(tmp_path: Path):
    earlier = [json.dumps({"event": "start"}), *[step(9.0)] * 9]
    last = [
        json.dumps({"event": "start"}), *[step(5.0)] * 3, step(1.0), json.dumps({"event": "checkpoint"}),
        step(0.35, data=0.1), step(0.25, memory=32 * GIB), '{"event": "st',
    ]  # fmt: skip
    path = written(tmp_path / "metrics.jsonl", *earlier, *last)
    assert measured(path) == Measured(steps=3, step_time_s=0.25, peak_memory_bytes=32 * GIB)
    assert measured(path, before=path.stat().st_size) is None, "a run that told nothing"


@pytest.mark.parametrize("count", [0, 5])
def test_too_few_steps_are_not_compared(count: int, tmp_path: Path):
    assert measured(written(tmp_path / "metrics.jsonl", *[step(1.0)] * count)) is None
    assert measured(tmp_path / "nothing") is None


def of_batch(samples: int, seconds: float) -> str:
    """A step of sequences of 256 tokens, on the 4 devices of the prediction."""
    rate = samples / seconds / 4
    values = {"seconds": seconds, "data_seconds": 0.0, "peak_memory": GIB, "tokens_per_sample": 256}
    return json.dumps({"event": "step", **values, "samples_per_second_per_device": rate})


def test_only_steps_of_the_full_batch_are_compared(tmp_path: Path):
    ramp, full = [of_batch(4, 0.03)] * 20, [of_batch(32, 0.25)] * 3
    run = measured(written(tmp_path / "metrics.jsonl", *ramp, *full), predicted=PREDICTED)
    assert run == Measured(steps=3, step_time_s=0.25, peak_memory_bytes=GIB, smaller_steps=17)
    assert "3 steps of the full batch" in next(compared(PREDICTED, run))


@pytest.mark.parametrize(("count", "said"), [(0, "none had"), (2, "2 had")])
def test_a_run_that_ends_with_its_ramp_says_that_nothing_is_compared(count: int, said: str, tmp_path: Path):
    lines = [*[of_batch(4, 0.03)] * 20, *[of_batch(32, 0.25)] * count]
    reason = measured(written(tmp_path / "metrics.jsonl", *lines), predicted=PREDICTED)
    assert isinstance(reason, str) and said in reason


def test_errors_are_relative_to_the_measurement():
    lines = list(compared(PREDICTED, Measured(steps=7, step_time_s=0.25, peak_memory_bytes=30 * GIB)))
    assert "7 steps" in lines[0]
    rows = {line[2:18].strip(): line[18:].split() for line in lines[2:]}
    assert rows["step time"] == ["200", "ms", "250", "ms", "-20.0%"]
    assert rows["tokens/s/device"] == ["10,240", "8,192", "+25.0%"]
    assert rows["MFU"] == ["50.0%", "40.0%", "+25.0%"]
    assert rows["peak active"] == ["33.0", "GiB", "30.0", "GiB", "+10.0%"]


def test_cpu_comparison_omits_memory_and_names_the_profile(tmp_path: Path):
    one = Predicted(
        step_time_s=0.2, samples_per_step=16, tokens_per_step=None, unit="samples", devices=4, model_flops=0.0,
        peak_flops_per_s_per_device=0.0, profile="cpu", of_this_machine=False, peak_memory_bytes=None,
    )  # fmt: skip
    run = Measured(steps=3, step_time_s=0.4, peak_memory_bytes=GIB)
    lines = list(compared(one, run))
    assert [line[2:18].strip() for line in lines[2:4]] == ["step time", "samples/s/device"]
    assert len(lines) == 5 and "legoai calibrate --processes 4" in lines[-1]
    assert not any("%" in line or "error" in line for line in lines)
    metrics = written(tmp_path / "metrics.jsonl", step(1.0), "")
    note(metrics, one, run)
    added = json.loads(metrics.read_text(encoding="utf-8").splitlines()[-1])
    assert added["event"] == "prediction"
    assert (added["predicted"]["step_time_s"], added["measured"]["step_time_s"]) == (0.2, 0.4)


@pytest.mark.parametrize("shipped", [True, False])
def test_a_profile_of_ones_own_named_as_the_catalogues_cpu_is_of_this_machine(shipped: bool):
    machine = machine_of(ClusterUse(device="cpu"), 1, directory=Path())
    if not shipped:  # as `legoai calibrate` writes cpu.toml and cpu.json.gz
        machine = replace(machine, profile=replace(machine.profile, hash="0123456789ab"))
    rank = SimpleNamespace(rank=0, memory=SimpleNamespace(peak=GIB))
    found: Any = SimpleNamespace(
        machine=machine,
        ranks=[rank],
        step_time=1.0,
        tokens_per_step=8,
        world_size=1,
        model_flops=1.0,
        peak_flops=1.0,
        unit="tokens",
    )
    found.fullest = rank
    one = Predicted.of(found, 2)
    assert one.of_this_machine != shipped
    assert (one.samples_per_step, one.tokens_per_step) == (2, 8)
    found.unit, found.tokens_per_step = "samples", 2
    assert (Predicted.of(found, 2).samples_per_step, Predicted.of(found, 2).tokens_per_step) == (2, None)


def test_records_follow_an_incomplete_line(tmp_path: Path):
    """A killed run leaves a part of a line, after which the devices of the next run are still read."""
    path = written(tmp_path / "metrics.jsonl", json.dumps({"event": "start"}), '{"event": "step", "st')
    note_cluster(path, ClusterUse(device="h100_sxm", hosts=2, devices=8, fabric="infiniband_ndr"), tmp_path)
    note(path, PREDICTED, Measured(steps=3, step_time_s=0.25, peak_memory_bytes=GIB))
    _, _, *added = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["event"] for line in added] == ["cluster", "prediction"]
