"""The simulator against torch's own estimators on published measurements: accuracy, and time of a prediction.

    python -m benchmarks.torch_tools FOLDER            FOLDER holds memory_single_gpu.csv, memory_distributed.csv, …

Rows of the published tables are written as plans, as in `benchmarks.validation`. Each tool predicts each plan in a cold
process of its own, so the time of a prediction includes imports. It is processor time, user and system, which hardly
depends on other load of the machine; no tool waits for anything, or uses more than one core. All tools get the same
lowered program and the same optimizer step (the second, whose optimizer has its state):

- `legoai`: `legoai.estimate` for the plan's H100; peak of active memory, step time.
- `MemTracker`, and for shards `FSDPMemTracker`, of `torch.distributed._tools`: on fake `cpu` tensors, since fake `cuda`
  tensors abort a torch that was built without CUDA. So these tools see the kernels of a cpu. DTensor infers shapes on
  separate fake tensors: on those of the step, the tracker would count unsharded tensors as memory.
- `RuntimeEstimator` of the same package, with its operator-level cost model. It queries the GPU of the process for its
  rates; here it gets those of the H100's datasheet.

Where a tool fails, its error message is recorded instead.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import math
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.machine import write_page

if TYPE_CHECKING:
    from benchmarks.validation.rows import Row
    from torch import nn

    from legoai.runtime.training.state import Training

RESULTS: Final = Path(__file__).parent / "results"
GIB: Final = 2**30
ROOT: Final = Path(__file__).parents[1]
TABLES: Final = ("memory_single_gpu", "memory_distributed")
"""Sources of measured memory in `benchmarks.validation`."""
TIMES: Final = "runtime_single_gpu"
"""Source of measured step times in `benchmarks.validation`."""
LIMIT_SECONDS: Final = 600
"""Limit of a tool's processor time, in seconds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One published run.

    Attributes:
        name: model, batch, length, precision, checkpointing.
        plan: text of the plan.
        beside: bytes that the run used and no tool counts, such as workspaces; they are added to each prediction.
        gib: measured peak memory, in GiB.
        seconds: measured step time, where published.
    """

    name: str
    plan: str
    beside: float
    gib: float
    seconds: float | None = None


def main() -> int:
    """Predict every case with every tool."""
    if len(sys.argv) > 1 and sys.argv[1] == "--ask":
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_SECONDS, LIMIT_SECONDS + 1))
        print(json.dumps(_ask(sys.argv[2], Path(sys.argv[3]), device=sys.argv[4])))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the published tables")
    parser.add_argument("--each", type=int, default=2, help="rows of each model (default: 2)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows whose name contains TEXT")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/torch_tools.json and .md")
    arguments = parser.parse_args()
    cases = list(_cases(arguments.folder, arguments.each))
    rows = []
    for case in (case for case in cases if arguments.only in case.name):
        tools = ["legoai", "FSDPMemTracker" if "FSDP" in case.name else "MemTracker"]
        tools += ["RuntimeEstimator"] if case.seconds is not None else []
        answers = {tool: _asked(tool, case) for tool in tools}
        rows.append({"case": case.name, "measured_gib": case.gib, "measured_s": case.seconds, "tools": answers})
        print(_line(rows[-1]), flush=True)
        if arguments.write:
            _write(_document(rows))
    on_cuda = _asked("MemTracker", next(case for case in cases if case.name.startswith("LLAMA ")), device="cuda")
    document = _document(rows) | {"MemTracker on fake cuda tensors": on_cuda.get("error", "it works")}
    if arguments.write:
        _write(document)
    print(_summary_text(document))
    return 0


def _cases(folder: Path, each: int) -> Iterator[Case]:
    """Yield rows of published memory that a plan can state.

    For each model, rows with a measured time come first, and then others, evenly spaced. Of fully sharded training on
    many devices, rows on one axis of the mesh are used.
    """
    from benchmarks.validation.rows import UnstatedError, read
    from benchmarks.validation.sources import SOURCES

    times = {_key(row): row.number("actual_ms") for row in read(folder / f"{TIMES}.csv")}
    for table in TABLES:
        by_model: dict[str, list[Row]] = {}
        for row in read(folder / f"{table}.csv"):
            doubtful = row.text("note").startswith(("INCONSISTENT", "OCR-DOUBT"))
            if not doubtful and "2D" not in row.text("parallelism"):
                by_model.setdefault(row.text("model"), []).append(row)
        for rows in by_model.values():
            timed = [row for row in rows if _key(row) in times]
            others = [row for row in rows if _key(row) not in times]
            for row in (timed + others[:: max(1, -(-len(others) // each))])[:each]:
                with contextlib.suppress(UnstatedError):
                    stated = SOURCES[table].convert(row, None)
                    seconds = times.get(_key(row))
                    yield Case(
                        name=" ".join((row.text("parallelism"), *_key(row))).strip(),
                        plan=stated.for_memory or stated.text,
                        beside=sum(stated.beside.values()),
                        gib=row.number("actual_gib") or math.nan,
                        seconds=None if seconds is None else seconds / 1e3,
                    )


def _key(row: Row) -> tuple[str, ...]:
    """Key of a run in two tables: model, batch, length, precision and checkpointing."""
    model = row.text("model").replace("_", " ").replace("LLAMA 1B", "LLAMA")
    checkpointed = {"TRUE": "Yes", "FALSE": "No"}.get(row.text("ac"), row.text("ac"))
    length = row.text("seq_or_img") or row.text("seq_len")
    return model, row.text("batch"), length, row.text("precision"), checkpointed


def _asked(tool: str, case: Case, *, device: str = "cpu") -> dict[str, Any]:
    """A tool's prediction and its processor time, or its error message."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "case.plan"
        path.write_text(case.plan, encoding="utf-8")
        command = [sys.executable, "-m", "benchmarks.torch_tools", "--ask", tool, str(path), device]
        with (Path(place) / "output").open("w+") as output, (Path(place) / "errors").open("w+") as errors:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=errors, env={**os.environ, "TORCH_SHOW_CPP_STACKTRACES": "0"}
            )
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            for stream in (output, errors):
                stream.seek(0)
            answer, log = output.read(), errors.read()
    took = used.ru_utime + used.ru_stime
    if process.returncode == -signal.SIGXCPU:
        return {"error": f"no prediction within {LIMIT_SECONDS} s of processor time"}
    if process.returncode:
        return {"error": _reason(log), "answer_s": took}
    predicted = json.loads(answer.splitlines()[-1])
    if "gib" in predicted:
        predicted["gib"] += case.beside / GIB
    return {**predicted, "answer_s": took}


def _reason(text: str) -> str:
    """The most informative line of an error's output."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    what = next((line for line in lines if line.startswith("what():")), None)
    return what or next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "no output")


def _ask(tool: str, path: Path, *, device: str) -> dict[str, float]:
    import legoai

    if tool == "legoai":
        found = legoai.estimate(path)
        return {"gib": found.peak_active / GIB, "seconds": found.step_time}
    program = legoai.lower(path)
    return _ask_torch(tool, program.text, world=legoai.load(path).mesh.world_size, device=device)


def _ask_torch(tool: str, text: str, *, world: int, device: str) -> dict[str, float]:
    """Run two steps of a program under one of torch's tools, on fake tensors."""
    from legoai.runtime.torch_internals.estimators import FSDPMemTracker, MemTracker, RuntimeEstimator

    with fake_steps(text, world=world, device=device) as (training, take):
        if tool == "RuntimeEstimator":
            take(0)
            with rates_of_h100(), RuntimeEstimator()("operator-level-cost-model") as estimator:
                take(1)
            return {"seconds": estimator.total_runtime / 1e3}
        sharded = tool == "FSDPMemTracker"
        tracker = FSDPMemTracker(training.model, training.optimizer) if sharded else MemTracker()
        if not sharded:
            tracker.track_external(training.model, training.optimizer)
        with tracker:
            take(0)
            tracker.reset_mod_stats()
            take(1)
        peak = tracker.get_tracker_snapshot("peak")
        return {"gib": max(sizes["Total"] for sizes in peak.values()) / GIB}


@contextlib.contextmanager
def fake_steps(text: str, *, world: int, device: str = "cpu") -> Iterator[tuple[Training, Callable[[int], object]]]:
    """The objects that a program trains on fake tensors, and the function that runs a step; valid while entered.

    Args:
        text: text of the program.
        world: number of ranks; this process is the first.
        device: device type of the fake tensors.
    """
    import torch.distributed as dist

    from legoai.cost.simulated.process import patched_meshes
    from legoai.runtime.device import Device
    from legoai.runtime.initialize import cast_parameters
    from legoai.runtime.torch_internals.distributed.fake_world import FakeStore
    from legoai.runtime.torch_internals.fake_tensors import FakeTensorMode, unset_fake_temporarily
    from legoai.runtime.torch_internals.patching import patched, patched_attribute
    from legoai.runtime.training import step as runtime_step
    from legoai.runtime.training.batches import Batches
    from legoai.runtime.training.step import take_step

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile(text, "program.py", "exec"), namespace)
    trainer = namespace["trainer"]()

    def outside(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with unset_fake_temporarily():
                return function(*args)

        return call

    def build_model() -> nn.Module:
        # With its dtype: the data of a parameter cannot become a fake tensor.
        model = built()
        cast_parameters(model, trainer.master_dtype)
        return model

    built = trainer.build_model
    trainer = dataclasses.replace(trainer, build_mesh=outside(trainer.build_mesh), build_model=outside(build_model))
    with (
        patched("torch.distributed.tensor._sharding_prop:detect_fake_mode", lambda *_: None),
        # Fake tensors have no values, and the ranks would sum up the value of the loss.
        patched_attribute(runtime_step, "sum_over_world", lambda values: [1.0] * len(values)),
        patched_meshes() if world > 1 else contextlib.nullcontext(),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        where = Device(type=device, holds_values=False)
        training = trainer.prepare(where, seed=0)
        batches = Batches(training, _Batches(trainer))
        yield training, lambda index: take_step(trainer, training, batches, step=index)
    dist.destroy_process_group()


@contextlib.contextmanager
def rates_of_h100() -> Iterator[None]:
    """Let torch's estimator run without a GPU, with the rates of an H100."""
    import torch

    from legoai.runtime.torch_internals.patching import patched
    from legoai.specs.cluster import device

    h100 = device("h100_sxm")

    def tflops(dtype: torch.dtype) -> float:
        single = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "fp32"
        named = {torch.float32: single, torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}
        return h100.peak(named[dtype]) / 1e12

    with (
        patched("torch.cuda:is_available", lambda: True),
        patched("torch.cuda:is_current_stream_capturing", lambda: False),
        patched("torch.utils._runtime_estimation:get_device_tflops", tflops),
        patched(
            "torch.utils._runtime_estimation:get_gpu_dram_gbps", lambda: h100.memory.bandwidth_bytes_per_second / 1e9
        ),
    ):
        yield


class _Batches:
    """Micro batches without values."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def next(self) -> Any:
        """The model's inputs, and the targets."""
        import torch

        from legoai.runtime.data.sequences import SampleBatch

        reads, sizes = self.trainer.reads, (self.trainer.micro_batch, self.trainer.seq_len)

        def empty(item: Any) -> torch.Tensor:
            return torch.empty(item.shape, dtype=self.trainer.master_dtype if item.floating else torch.int64)

        return SampleBatch(inputs=tuple(map(empty, reads.inputs(*sizes))), targets=empty(reads.targets(*sizes)))

    def skip(self, batches: int) -> None:
        """Read nothing."""


def _document(rows: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    from legoai.runtime.device import processor_name

    tools: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for tool, answer in row["tools"].items():
            if "gib" in answer:
                found = abs(answer["gib"] / row["measured_gib"] - 1)
                tools.setdefault("legoai" if tool == "legoai" else "torch", []).append((found, answer["answer_s"]))
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "machine": processor_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 1),
        "rows": rows,
        "memory": {
            tool: {
                "rows": len(found),
                "mean_error": statistics.fmean(error for error, _ in found),
                "worst_error": max(error for error, _ in found),
                "median_answer_s": statistics.median(took for _, took in found),
            }
            for tool, found in tools.items()
        },
    }


def _cell(answer: dict[str, Any], measured: float) -> str:
    if "gib" not in answer:
        return answer.get("error", "–").replace("|", "/")
    return f"{answer['gib']:.2f} ({answer['gib'] / measured - 1:+.1%}) in {answer['answer_s']:.1f} s"


def _line(row: dict[str, Any]) -> str:
    cells = [f"{tool}: {_cell(answer, row['measured_gib'])}" for tool, answer in row["tools"].items()]
    return f"{row['case']:38} measured {row['measured_gib']:6.2f} GiB  " + "  ".join(cells)


def _summary_text(document: dict[str, Any]) -> str:
    return "\n".join(
        f"{tool}: {found['rows']} rows, memory error mean {found['mean_error']:.1%}, worst {found['worst_error']:.1%}, "
        f"median processor time {found['median_answer_s']:.1f} s"
        for tool, found in document["memory"].items()
    )


def _write(document: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    lines = [
        f"# The simulator against torch's own estimators ({document['date']})",
        "",
        f"{document['machine']}, torch {document['torch']}, Python {document['python']}, load average "
        f"{document['load_average']}. Predicted peak memory in GiB, its error, and the processor time of the "
        "prediction in a cold process.",
        "`python -m benchmarks.torch_tools FOLDER --write`",
        "",
        "| published run | measured | legoai | MemTracker or FSDPMemTracker |",
        "|---|---|---|---|",
    ]
    for row in document["rows"]:
        tools, measured = row["tools"], row["measured_gib"]
        other = next(answer for tool, answer in tools.items() if "MemTracker" in tool)
        lines.append(
            f"| {row['case']} | {measured:.2f} | {_cell(tools['legoai'], measured)} | {_cell(other, measured)} |"
        )
    lines += ["", "| published run | step measured, s | legoai | RuntimeEstimator |", "|---|---|---|---|"]
    for row in (row for row in document["rows"] if row["measured_s"]):
        cells = []
        for tool in ("legoai", "RuntimeEstimator"):
            answer = row["tools"][tool]
            known = "seconds" in answer
            cells.append(
                f"{answer['seconds']:.3f} ({answer['seconds'] / row['measured_s'] - 1:+.1%})"
                if known
                else str(answer.get("error")).replace("|", "/")
            )
        lines.append(f"| {row['case']} | {row['measured_s']:.3f} | {' | '.join(cells)} |")
    lines += ["", *_summary_text(document).splitlines()]
    if "MemTracker on fake cuda tensors" in document:
        lines += ["", f"MemTracker on fake `cuda` tensors: {document['MemTracker on fake cuda tensors']}"]
    write_page(RESULTS / "torch_tools.json", document, lines)


if __name__ == "__main__":
    sys.exit(main())
