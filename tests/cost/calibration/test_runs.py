"""Calibration of a machine: curves fitted to measurements, and the profile written from them."""

from __future__ import annotations

import functools
import itertools
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from legoai.cost.calibration import runs
from legoai.cost.calibration.movement import three_segments
from legoai.cost.calibration.output import OutputError
from legoai.cost.calibration.runs import NoDeviceError, calibrate_machine
from legoai.cost.calibration.timing import CACHE_BYTES, measure, out_of_cache
from legoai.cost.kernels.kinds import Movement, Product
from legoai.cost.kernels.roofline import MovementCurve
from legoai.cost.machine.collective_time import network_of, seconds_on
from legoai.cost.machine.kernel_time import seconds_of
from legoai.cost.network.topology import Placement
from legoai.cost.profiles import load
from legoai.specs.cluster import Cluster, profile_path
from legoai.specs.device_file import load_device


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibrated") / "here.toml"
    command = ["calibrate", "--device", "cpu", "--processes", "2", "--seconds", "2", "-o", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "legoai", *command], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return path


@pytest.mark.slow
def test_a_calibration_can_be_named_in_a_plan(calibrated: Path) -> None:
    measured = load_device(calibrated)
    assert (measured.name, measured.kind, measured.devices_per_host) == ("here", "cpu", 2)
    assert measured.figure("memory.bandwidth_bytes_per_second") > 1e8
    assert profile_path(calibrated).is_file()
    assert sorted(path.name for path in calibrated.parent.iterdir()) == ["here.json.gz", "here.toml"]


@pytest.mark.slow
def test_calibration_states_date_torch_version_and_errors(calibrated: Path) -> None:
    found = load(profile_path(calibrated))
    (source,) = found.sources
    assert source["torch"] == torch.__version__
    assert "threads" in source["from"]
    assert source["dated"] == found.made
    assert found.held_out["movement elementwise"]["rows"] > 0


@pytest.mark.slow
def test_calibrated_product_time_equals_the_measurement(calibrated: Path) -> None:
    found = load(profile_path(calibrated))
    product = Product(batch=1, m=128, n=128, k=128, rate="fp32", bytes=3 * 4 * 128**2)
    seconds, model = seconds_of(product, found)
    assert model == "measured table"
    a, b = torch.randn(128, 128), torch.randn(128, 128)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        took = measure(lambda: torch.mm(a, b), "cpu", 0.2)
    finally:
        torch.set_num_threads(threads)
    assert seconds == pytest.approx(took, rel=4.0)


@pytest.mark.slow
def test_calibrated_profile_has_measured_collectives(calibrated: Path) -> None:
    found = load(profile_path(calibrated))
    cluster = Cluster(device=load_device(calibrated), hosts=1, devices_per_host=2)
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"):
        seconds, model = seconds_on(Placement(2, 1, 2), kind, 2**16, network_of(cluster), found)
        assert 1e-6 < seconds < 1.0
        assert model == "measured table"


def test_more_processes_than_gpus_are_refused(tmp_path: Path) -> None:
    count = torch.cuda.device_count() + 1
    with pytest.raises(NoDeviceError, match=f"{count} processes need {count} gpus"):
        calibrate_machine(tmp_path / "x.toml", device="cuda", seconds=1, processes=count, progress=lambda text: None)


@pytest.mark.parametrize(
    "arguments", [["--seconds", "0"], ["--processes", "none"], ["-o", "x.json"], ["-o", "x\x7f.toml"]]
)
def test_a_wrong_command_line_is_refused(arguments: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "legoai", "calibrate", *arguments],
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("taken", ["ours.toml", "ours.json.gz"])
def test_files_that_cannot_be_written_are_refused_before_measuring(taken: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(runs, "calibrate", None)
    (tmp_path / taken).mkdir()
    for processes in (1, 2):
        with pytest.raises(OutputError, match=f"{taken} cannot be written: Is a directory"):
            calibrate_machine(
                tmp_path / "ours.toml", device="cpu", seconds=1, processes=processes, progress=lambda text: None
            )
    assert [path.name for path in tmp_path.iterdir()] == [taken]


def test_device_file_may_have_any_name(tmp_path: Path) -> None:
    document = {
        "sources": [{"from": 'a "CPU"', "dated": "2026-01-01", "torch": "2.13"}],
        "products": {"fp32": {"curve": {"peak": 1e12}}},
        "movement": {"elementwise": {"rate": 1e10}},
    }
    path = tmp_path / 'my"gpu\\é.toml'
    path.write_text(runs.device_file(path.stem, "cpu", document, 1), encoding="utf-8")
    assert load_device(path).name == path.stem


@pytest.mark.slow
def test_interrupt_of_the_first_process_ends_a_calibration_of_several(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "legoai", "calibrate", "--device", "cpu", "--processes", "2", "--seconds", "600"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "legoai: host time of calls\n"
        time.sleep(1)  # the other process starts meanwhile
        process.send_signal(signal.SIGINT)
        # Its children share the pipe, which ends with the last of them.
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert not list(tmp_path.iterdir())


def test_fit_recovers_a_three_segment_curve() -> None:
    truth = MovementCurve(rate=1e10, floor=0.0, first=2.0**14, second=2.0**22, slope_first=0.0, slope_second=0.6)
    points = [(2.0**power, truth.seconds(2.0**power)) for power in range(10, 27)]
    found = MovementCurve.read({**three_segments(points), "floor": 0.0})
    for moved, seconds in points:
        assert math.log(found.seconds(moved) / seconds) == pytest.approx(0.0, abs=0.02)


def test_shipped_cpu_profile_has_measured_movement() -> None:
    from legoai.cost.profiles import profile

    cpu = profile("cpu")
    seconds, model = seconds_of(Movement(kind="copy", bytes=2**24), cpu)
    assert model == "measured table"
    assert 1e8 < 2**24 / seconds < 1e11


@pytest.mark.parametrize(
    ("moved", "least", "sets"),
    [(CACHE_BYTES / 4, 1, 4), (CACHE_BYTES * 2, 1, 1), (CACHE_BYTES * 2, 3, 3), (1, 1, 512), (1, 600, 600)],
)
def test_benchmark_operands_exceed_the_caches_and_rotate(moved: float, least: int, sets: int) -> None:
    numbers = itertools.count()
    run = out_of_cache(lambda: functools.partial(int, next(numbers)), moved, least=least)
    assert [run() for _ in range(2 * sets)] == [*range(sets), *range(sets)]
