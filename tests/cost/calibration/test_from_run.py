"""Calibration from runs: of two real ranks over gloo, and from traces of GPUs."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import legoai
from legoai.cli import main
from legoai.cost.calibration.from_run import calibrate_from, read_base
from legoai.cost.calibration.observed.kernels import kernel_times
from legoai.cost.calibration.observed.run_folder import RunFolderError, run_folder
from legoai.cost.calibration.observed.trace_files import read_trace
from legoai.cost.capture import capture
from legoai.cost.kernels.kinds import Attention, Movement, Product, Work
from legoai.cost.kernels.work import work_of
from legoai.cost.machine.kernel_time import seconds_of
from legoai.cost.profiles import ProfileError, load, profile, read_document, write_document
from legoai.cost.report.run import Measured, measured, note_cluster
from legoai.cost.trace.records import Kernel
from legoai.runtime import RunOptions
from legoai.specs.cluster import device, device_names
from legoai.specs.device_file import load_device, text_of
from legoai.specs.directives.cluster import ClusterUse
from support.simulation.simulated import in_a_fork
from support.simulation.traces import GpuTrace
from support.texts.plans import lowered
from support.training import corpus

data, own_cache = corpus.data, corpus.own_cache

PLAN = """\
plan two

model   llama3("tiny")
cluster cpu(devices = 2)
batch   (global = 4, micro = 2, seq_len = 64)
mesh    (dp_shard = 2)

fsdp on dp_shard { layers.* = unit }
precision (param = fp32, reduce = fp32)
"""
ON_OURS = PLAN.replace("cpu(", 'profile("ours.toml", ')
MM = ("aten::mm", [[64, 32], [32, 16]], ["c10::BFloat16", "c10::BFloat16"])


def silent(text: str) -> None:
    pass


def train(text: str, **options: Any) -> None:
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile(text, "program.py", "exec"), namespace)
    namespace["trainer"]().fit(RunOptions(device="cpu", log_every=0, steps=9, profile_step=5, **options))


@pytest.fixture(scope="module")
def run(gloo: Callable[[int], Any], data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the plan, with a profiled step of both ranks."""
    out: Path = tmp_path_factory.mktemp("runs") / "two"
    gloo(2)(train, lowered(PLAN).text, out=out, data=data)
    return out


@pytest.fixture(scope="module")
def ours(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A device file calibrated from the run."""
    path = tmp_path_factory.mktemp("devices") / "ours.toml"
    found = calibrate_from(path, [run], base=None, progress=silent)
    assert found.base == "cpu"
    return path


@pytest.mark.slow
def test_traced_step_has_the_simulated_kernels(run: Path) -> None:
    simulated = in_a_fork(simulated_kernels)
    found = kernel_times(read_trace(run / "profile" / "step-5-rank-0.json")).seconds
    seen = Counter({work: len(times) for work, times in found.items()})

    def of(kinds: type | tuple[type, ...], counts: Counter[Any]) -> Counter[Any]:
        return Counter({work: count for work, count in counts.items() if isinstance(work, kinds)})

    assert of((Product, Attention), seen) == of((Product, Attention), simulated)
    moved = of(Movement, simulated).items()
    large = {work: count for work, count in moved if work.bytes > 2**14 and work.form != "foreach"}
    known = sum(min(seen[work], count) for work, count in large.items())
    assert known > 0.98 * sum(large.values())


def simulated_kernels() -> Counter[Work]:
    trace = capture(lowered(PLAN), world=2, kind="cpu", replay=False)
    span = trace.steps[1]
    return Counter(work_of(one) for one in trace.records[span.start : span.stop] if isinstance(one, Kernel))


@pytest.mark.slow
def test_calibration_reduces_the_prediction_error(run: Path, ours: Path) -> None:
    path = ours.with_name("two.plan")
    path.write_text(PLAN, encoding="utf-8")
    before = in_a_fork(step_time, path, None)
    after = in_a_fork(step_time, path, str(ours))
    real = measured(run / "metrics.jsonl")
    assert isinstance(real, Measured)
    assert abs(after / real.step_time_s - 1) < abs(before / real.step_time_s - 1), (before, after, real)


def step_time(path: Path, device_file: str | None) -> float:
    return legoai.estimate(path, profile=device_file).step_time


def cost_of(path: Path) -> Any:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["cost", str(path), "--json"]) == 0
    return json.loads(out.getvalue())


@pytest.mark.slow
def test_calibrated_device_can_be_named_in_a_plan(ours: Path) -> None:
    path = ours.with_name("on_ours.plan")
    path.write_text(ON_OURS, encoding="utf-8")
    assert in_a_fork(cost_of, path)["cluster"]["device"] == "ours"
    assert (load_device(ours).kind, load_device(ours).devices_per_host) == ("cpu", 2)
    assert sorted(item.name for item in ours.parent.iterdir() if "ours" in item.name and item.suffix != ".plan") == [
        "ours.json.gz", "ours.toml",
    ]  # fmt: skip


def test_the_profile_states_its_sources(run: Path, ours: Path) -> None:
    found = load(ours.with_suffix(".json.gz"))
    first, *others = found.sources
    assert list(others) == list(profile("cpu").sources)
    assert "profile cpu" in first["what"] and "step 5, 2 of 2 ranks" in first["from"]
    assert any(part.startswith("products fp32: ") for part in first["parts"])
    assert "the last rank to arrive does not wait" in first["collectives"]
    assert found.constants["kernel_gap_seconds"].value > 0
    for name, model in profile("cpu").products.items():
        if name != "fp32":
            own, table = found.products[name], model.table
            assert own.table is not None and table is not None and own.scale == model.scale and own.observed is None
            assert own.table.ratios == table.ratios


def test_run_folder_gives_devices_and_ranks_per_host(run: Path) -> None:
    found = run_folder(run)
    assert (found.start["device"], found.start["local_world"], found.ranks_per_host) == ("cpu", 2, 2)
    assert found.start["processor"]
    assert [trace.rank for trace in found.read("5")] == [0, 1]


SHAPES = ((1024, 1024, 512), (2048, 1024, 512), (4096, 4096, 1024), (8192, 1024, 4096), (512, 512, 512))
"""Rows, columns and depth of the products of a run."""


def product(m: int, n: int, k: int) -> Product:
    return Product(batch=1, m=m, n=n, k=k, rate="bf16", bytes=2 * (m * k + k * n + m * n))


def gpu_run(
    folder: Path,
    *,
    factor: float = 1.3,
    fabric: str | None = "infiniband_ndr",
    shapes: Sequence[tuple[int, int, int]] = SHAPES,
) -> Path:
    """A run of 2 of 16 ranks on H100s whose kernels take ``factor`` times their time in the profile."""
    base = profile("h100_sxm")
    groups = [("0", range(16)), ("1", range(8)), ("2", range(8, 16))]
    for rank in (0, 1):
        trace = GpuTrace(rank, 16, groups)
        for repeat in range(4):
            for m, n, k in shapes:
                took = seconds_of(product(m, n, k), base)[0] * factor * (1 + 0.01 * (repeat % 2))
                trace.call("aten::mm", [[m, k], [k, n]], ["c10::BFloat16"] * 2, took * 1e6)
            for size in (2**20, 2**22, 2**24, 2**25, 2**26):
                took = seconds_of(Movement(kind="elementwise", bytes=6 * size, rate="bf16"), base)[0] * 1.2
                types = ["c10::BFloat16", "c10::BFloat16", "Scalar"]
                trace.call("aten::add", [[size], [size], []], types, took * 1e6, values=["", "", "1"])
            late = 500.0 if rank == repeat % 2 else 0.0
            trace.collective("_allgather_base", (2**20, 2**23), 200.0 + late, group=groups[1], dtype="BFloat16")
            trace.collective("allreduce", (2**20, 2**20), 900.0 + late, group=("0", range(16)))
        trace.write(folder / "profile" / f"step-3-rank-{rank}.json.gz")
    use = ClusterUse(device="h100_sxm", hosts=2, devices=8, fabric=fabric)
    note_cluster(folder / "metrics.jsonl", use, folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"event": "start", "world": 16, "local_world": 8, "device": "cuda", "torch": "2.13"}) + "\n{"
        )
    return folder


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A device file calibrated from traces of GPUs, and the result of each part."""
    path = tmp_path_factory.mktemp("gpus") / "ours.toml"
    found = calibrate_from(path, [gpu_run(path.parent / "run")], base=None, progress=silent)
    assert found.base == "h100_sxm"
    return path, {part.name: part for part in found.parts}


def test_observed_shapes_are_measured_and_others_scaled(gpus: tuple[Path, dict[str, Any]]) -> None:
    path, parts = gpus
    base, found = profile("h100_sxm"), load(path.with_suffix(".json.gz"))
    assert parts["products bf16"].result == "measured" and parts["products bf16, other shapes"].result == "scaled"
    assert parts["products bf16"].trial.before["median"] == pytest.approx(0.24, abs=0.02)
    assert parts["products bf16"].trial.after["median"] < 0.02
    for m, n, k in ((4096, 4096, 1024), (16384, 8192, 16384)):
        work = product(m, n, k)
        assert seconds_of(work, found)[0] == pytest.approx(1.3065 * seconds_of(work, base)[0], rel=0.02)
    untouched = Product(batch=1, m=4096, n=4096, k=1024, rate="fp8", bytes=2**22)
    assert seconds_of(untouched, found) == seconds_of(untouched, base)


def test_movement_is_corrected_by_kind(gpus: tuple[Path, dict[str, Any]]) -> None:
    path, _ = gpus
    base, found = profile("h100_sxm"), load(path.with_suffix(".json.gz"))
    for size in (2**10, 2**21, 2**24, 3 * 2**30, 2**36):
        work = Movement(kind="elementwise", bytes=size)
        assert seconds_of(work, found)[0] == pytest.approx(1.2 * seconds_of(work, base)[0], rel=0.05), size
        other = Movement(kind="reduction", bytes=size)
        assert seconds_of(other, found) == seconds_of(other, base)


def test_collectives_are_corrected_by_hosts_and_ranks_per_host(gpus: tuple[Path, dict[str, Any]]) -> None:
    from legoai.cost.machine.cluster import machine_of
    from legoai.cost.machine.collective_time import seconds_on
    from legoai.cost.network.topology import Placement

    path, parts = gpus
    assert parts["links all_gather of 8"].result == "measured"
    assert parts["fabric infiniband_ndr all_reduce of 2 x 8"].result == "measured"
    assert parts["host python"].result == "kept"
    use = ClusterUse(device="h100_sxm", hosts=2, devices=8, fabric="infiniband_ndr")
    ours, base = (machine_of(use, 16, directory=path.parent, override=name) for name in (str(path), None))

    def takes(machine: Any, kind: Any, size: int, on: Placement) -> float:
        return seconds_on(on, kind, size, machine.network, machine.profile)[0]

    assert takes(ours, "all_gather", 2**24, Placement(8, 1, 8)) == pytest.approx(200e-6, rel=0.01)
    assert takes(ours, "all_reduce", 2**22, Placement(16, 2, 8)) == pytest.approx(900e-6, rel=0.01)
    # Two hosts take no less than the one that was measured.
    assert takes(ours, "all_gather", 2**24, Placement(16, 2, 8)) == pytest.approx(200e-6, rel=0.01)
    for kind, size, on in (
        ("all_gather", 2**24, Placement(4, 1, 4)),
        ("reduce_scatter", 2**24, Placement(8, 1, 8)),
        ("all_reduce", 2**22, Placement(32, 4, 8)),
        ("all_gather", 2**20, Placement(16, 2, 8)),
        ("all_reduce", 2**29, Placement(16, 2, 8)),
    ):
        assert takes(ours, kind, size, on) == pytest.approx(takes(base, kind, size, on), rel=1e-6), (kind, size, on)


def test_device_file_has_memory_and_ranks_of_the_run(gpus: tuple[Path, dict[str, Any]]) -> None:
    made, base = load_device(gpus[0]), device("h100_sxm")
    assert (made.figure("memory.capacity_bytes"), made.devices_per_host) == (85_100_000_000, 8)
    assert made.description == "NVIDIA A100-SXM4-80GB, calibrated from h100_sxm"
    assert made.peak("bf16") == base.peak("bf16") and made.link == base.link


@pytest.mark.parametrize("name", device_names())
def test_device_file_round_trip(name: str, tmp_path: Path) -> None:
    own = device(name)
    text = text_of(
        own, name=own.name, description=own.description, devices_per_host=own.devices_per_host, capacity_bytes=None
    )
    (tmp_path / "same.toml").write_text(text, encoding="utf-8")
    again = load_device(tmp_path / "same.toml")
    assert all(getattr(again, field) == getattr(own, field) for field in type(own).fields_)


def test_calibrated_device_can_be_the_base(ours: Path, run: Path, tmp_path: Path) -> None:
    found = calibrate_from(tmp_path / "again.toml", [run, run], base=str(ours), progress=silent)
    assert found.base == "ours"
    assert len(load(tmp_path / "again.json.gz").sources) == len(profile("cpu").sources) + 2
    assert read_base(str(ours)).document["device"] == "ours"


def test_calibrated_base_predicts_with_the_fabric_that_it_measured(
    gpus: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """The run from which the base was made shows no error of it."""
    path, _ = gpus
    found = calibrate_from(tmp_path / "again.toml", [path.parent / "run"], base=str(path), progress=silent)
    trials = {part.name: part.trial for part in found.parts}
    trial = trials["fabric infiniband_ndr all_reduce of 2 x 8"]
    assert trial is not None
    assert trial.before["median"] < 0.01
    assert load(tmp_path / "again.json.gz").fabrics == load(path.with_suffix(".json.gz")).fabrics


def test_second_calibration_keeps_the_shapes_of_the_first(gpus: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Of a shape that both runs have, the time of the second counts; of others that of the first."""
    path, _ = gpus
    base, first, own = profile("h100_sxm"), load(path.with_suffix(".json.gz")), (3000, 7000, 2000)
    other = gpu_run(tmp_path / "other", factor=1.6, shapes=(own, SHAPES[0]))
    found = calibrate_from(tmp_path / "again.toml", [other], base=str(path), progress=silent)
    assert {part.name: part.result for part in found.parts}["products bf16"] == "measured"
    both = load(tmp_path / "again.json.gz")
    for shape in (own, SHAPES[0]):
        measured_here = 1.6 * seconds_of(product(*shape), base)[0]
        assert seconds_of(product(*shape), both)[0] == pytest.approx(measured_here, rel=0.02)
    for shape in (*SHAPES[1:], (2304, 1024, 512)):
        assert seconds_of(product(*shape), both) == seconds_of(product(*shape), first), shape


def test_incomplete_profile_of_the_base_is_refused(gpus: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, _ = gpus
    shutil.copy(path, tmp_path / "part.toml")
    document, _ = read_document(path.with_suffix(".json.gz"))
    del document["held_out"]
    write_document(tmp_path / "part.json.gz", document)
    with pytest.raises(ProfileError, match=r"part\.json\.gz is no complete profile: held_out: Field required"):
        calibrate_from(tmp_path / "new.toml", [path.parent / "run"], base=str(tmp_path / "part.toml"), progress=silent)


def test_calibration_without_improvement_keeps_the_base(tmp_path: Path) -> None:
    run = gpu_run(tmp_path / "run", factor=1.0)
    found = calibrate_from(tmp_path / "ours.toml", [run], base=None, progress=silent)
    parts = {part.name: part for part in found.parts}
    scaled = parts["products bf16, other shapes"]
    base, new = profile("h100_sxm"), load(tmp_path / "ours.json.gz")
    for m in (256, 4000, 16384):
        work = Product(batch=1, m=m, n=m, k=m, rate="bf16", bytes=6 * m * m)
        assert seconds_of(work, new)[0] == pytest.approx(seconds_of(work, base)[0], rel=0.011), scaled


def broken(folder: Path, kind: str) -> Path:
    """A run's folder in which something is wrong."""
    if kind == "missing":
        return folder / "nowhere"
    run = gpu_run(folder / "run")
    first = run / "profile" / "step-3-rank-0.json.gz"
    if kind == "empty":
        shutil.rmtree(run / "profile")
    elif kind == "cut":
        first.write_bytes(first.read_bytes()[:2000])
    elif kind == "other":
        GpuTrace(0, 4).write(first)
        trace = GpuTrace(0, 4)
        trace.call(*MM, 3.0)
        trace.write(first)
    elif kind == "twice":
        shutil.copy(first, run / "profile" / "step-3-rank-7.json.gz")
    elif kind == "unnamed":
        (run / "metrics.jsonl").unlink()
    elif kind == "elsewhere":
        use = ClusterUse(device="ours", hosts=2, devices=8, profile="gone.toml")
        note_cluster(run / "metrics.jsonl", use, folder)
    return run


@pytest.mark.parametrize(
    ("kind", "base", "said"),
    [
        ("missing", None, "there is no folder"),
        ("empty", None, "--profile-step N` writes one"),
        ("cut", None, "is incomplete"),
        ("other", None, "a trace of 4 ranks, and the run had 16"),
        ("twice", None, "two traces of one rank"),
        ("unnamed", None, "--base DEVICE"),
        (
            "elsewhere",
            None,
            "gone.toml as the device file of its plan, which is not on this machine; give --base DEVICE",
        ),
        ("right", "cpu", "`cpu` is a CPU"),
    ],
)
def test_unusable_run_is_refused_without_output(kind: str, base: str | None, said: str, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError) as error:
        calibrate_from(tmp_path / "ours.toml", [broken(tmp_path, kind)], base=base, progress=silent)
    assert said in str(error.value)
    assert not list(tmp_path.glob("ours*"))


def test_cpu_traces_cannot_calibrate_a_gpu(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no kernels of a GPU"):
        calibrate_from(tmp_path / "ours.toml", [run], base="h100_sxm", progress=silent)


def test_command_prints_each_part_and_refuses_wrong_arguments(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    gpu_run(tmp_path / "run")
    assert main(["calibrate", "--from", "run", "-o", "ours.toml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "error of h100_sxm" in lines[0]
    (line,) = [line for line in lines if line.startswith("products bf16,")]
    assert line.split()[4:6] == ["5", "5"] and "scaled: " in line
    assert any(line.startswith("untouched, as in h100_sxm: products bf16 grouped, fp16") for line in lines)
    assert any(line.startswith("warning: the traces are of NVIDIA A100") for line in lines)
    assert lines[-1] == "wrote ours.toml and ours.json.gz"
    for arguments, said in (
        (["--base", "cpu"], "there is no --from"),
        (["--from", "run", "--seconds", "3"], "--from measures nothing here"),
        (["--from", "nowhere"], "there is no folder nowhere"),
        (["--from", "run", "--base", "h900"], "unknown device 'h900'"),
        (["--from", "run", "--base", "none.toml"], "none.toml"),
    ):
        assert main(["calibrate", *arguments]) == 2
        assert said in capsys.readouterr().err
