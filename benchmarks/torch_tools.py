"""How does the simulator compare with torch's own estimators on published measurements: accuracy, and time to answer?

    python benchmarks/torch_tools.py FOLDER            FOLDER holds memory_single_gpu.csv, memory_distributed.csv, …

Every row of the published tables that can be written as a plan is given to each tool in a process of its own, which
starts cold: importing is part of the time to answer. That is processor time, user and system, since it hardly depends
on what else runs on the machine; no tool waits for anything, or uses more than one core. All tools are asked about the
same lowered program and the same optimizer step (the second, whose optimizer has its state):

- `legoai`: `legoai.estimate` for the plan's H100, peak of active memory, step time.
- `MemTracker`, and for shards `FSDPMemTracker`, of `torch.distributed._tools`: on fake tensors of a cpu, since on those
  of `cuda` a torch that was built without CUDA ends the process. They see a cpu's kernels then.
- `RuntimeEstimator` of the same package, by its cost model of operators.

What a tool says when it fails is written down in its place.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import datetime
import json
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
from typing import Any, Final

ZOO: Final = Path(__file__).parents[1] / "plans" / "zoo"
RESULTS: Final = Path(__file__).parent / "results"
GIB: Final = 2**30
MODELS: Final = {
    "GEMMA_2B": "gemma_2b", "HF_CLIP": "clip_l14_336", "HF_GPT2": "gpt2_large", "HF_T5": "t5_large",
    "LLAMA_1B": "llama3_1b", "CONVNEXT": "convnextv2_huge", "TIMM_VIT": "vit_h14",
}  # fmt: skip
"""The plan of each model of the published table."""
RUNTIME_NAMES: Final = {
    "GEMMA 2B": "GEMMA_2B", "HF CLIP": "HF_CLIP", "HF GPT2": "HF_GPT2", "HF T5": "HF_T5", "LLAMA": "LLAMA_1B",
    "CONVNEXT": "CONVNEXT", "TIMM VIT": "TIMM_VIT",
}  # fmt: skip
"""The same models as the table of times names them."""
VARIANTS: Final = {
    ("MP", "No"): None, ("FP", "No"): "full", ("HP", "No"): "half", ("MP", "Yes"): "checkpointed",
    ("FP", "Yes"): "full_checkpointed", ("HP", "Yes"): "half_checkpointed",
}  # fmt: skip
LIMIT_SECONDS: Final = 600
"""Processor time after which a tool is given up."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One published run.

    Attributes:
        name: model, batch, length, precision, checkpointing.
        files: of the folder in which its plan stands, by name.
        variant: of the plan.
        gib: measured peak memory.
        seconds: measured time of a step, where it was published.
    """

    name: str
    files: dict[str, str]
    variant: str | None
    gib: float
    seconds: float | None = None


def main() -> int:
    """Ask every tool about every case."""
    if len(sys.argv) > 1 and sys.argv[1] == "--ask":
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_SECONDS, LIMIT_SECONDS + 1))
        print(json.dumps(_ask(sys.argv[2], Path(sys.argv[3]), sys.argv[4] or None, device=sys.argv[5])))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the published tables")
    parser.add_argument("--each", type=int, default=2, help="rows of each model (default: 2)")
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/torch_tools.json and .md")
    arguments = parser.parse_args()
    cases = [*_single(arguments.folder, arguments.each), *_distributed(arguments.folder)]
    rows = []
    for case in (case for case in cases if arguments.only in case.name):
        tools = ["legoai", "FSDPMemTracker" if "FSDP" in case.name else "MemTracker"]
        tools += ["RuntimeEstimator"] if case.seconds is not None else []
        answers = {tool: _asked(tool, case) for tool in tools}
        rows.append({"case": case.name, "measured_gib": case.gib, "measured_s": case.seconds, "tools": answers})
        print(_line(rows[-1]), flush=True)
        if arguments.write:
            _write(_document(rows))
    on_cuda = _asked("MemTracker", next(case for case in cases if "LLAMA_1B" in case.name), device="cuda")
    document = _document(rows) | {"MemTracker on fake cuda tensors": on_cuda.get("error", "it works")}
    if arguments.write:
        _write(document)
    print(_summary_text(document))
    return 0


def _published(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def _single(folder: Path, each: int) -> Iterator[Case]:
    """Rows of the table of single GPUs that are not marked as inconsistent: those with a time, then evenly others."""
    times = {}
    for row in _published(folder / "runtime_single_gpu.csv"):
        checkpointed = "Yes" if row["ac"] == "TRUE" else "No"
        model = RUNTIME_NAMES.get(row["model"], row["model"])
        times[model, row["batch"], row["seq_or_img"], row["precision"], checkpointed] = float(row["actual_ms"]) / 1e3
    rows = [
        row
        for row in _published(folder / "memory_single_gpu.csv")
        if row["model"] in MODELS and not row["note"].startswith(("INCONSISTENT", "OCR-DOUBT"))
    ]
    for model, plan in MODELS.items():
        own = {
            (row["batch"], row["seq_or_img"], row["precision"], row["ac"]): row for row in rows if row["model"] == model
        }
        timed = [key for key in own if (model, *key) in times]
        others = [key for key in own if key not in timed]
        for key in (timed + others[:: max(1, -(-len(others) // each))])[:each]:
            row = own[key]
            yield Case(
                name=" ".join((model, *key)),
                files={
                    "case.plan": _resized((ZOO / f"{plan}.plan").read_text("utf-8"), row["batch"], row["seq_or_img"]),
                    f"{plan}.json": (ZOO / f"{plan}.json").read_text("utf-8"),
                },
                variant=VARIANTS[row["precision"], row["ac"]],
                gib=float(row["actual_gib"]),
                seconds=times.get((model, *key)),
            )


def _resized(text: str, batch: str, length: str) -> str:
    """A plan with another batch, and where it reads text with another length."""
    return "".join(_with_batch(line, batch, length) for line in text.splitlines(keepends=True))


def _with_batch(line: str, batch: str, length: str) -> str:
    if not line.startswith("batch"):
        return line
    # The table's number is a length of text, or else the width of an image, which the model's config has.
    seq_len = f", seq_len = {length}" if "seq_len" in line and length != "336" else _kept(line)
    return f"batch (global = {batch}, micro = {batch}{seq_len})\n"


def _kept(line: str) -> str:
    """The length of text that a plan has, if any."""
    found = [part for part in line.strip().partition("(")[2].rstrip(")").split(",") if "seq_len" in part]
    return f",{found[0]}" if found else ""


def _distributed(folder: Path) -> Iterator[Case]:
    """Rows of fully sharded Llama 3.1 70B on 64 devices, four on a host."""
    for row in _published(folder / "memory_distributed.csv"):
        if row["table"] != "4.15" or (row["batch"], row["seq_len"]) not in (("1", "8192"), ("2", "256")):
            continue
        batch, length = int(row["batch"]), int(row["seq_len"])
        kept = "full" if row["ac"] == "FULL" else "selective([attention, alternate_matmul])"
        text = f"""\
plan case
model llama3("70b")
cluster h100_sxm(hosts = 16, devices = 4, fabric = infiniband_ndr)
batch (global = {64 * batch}, micro = {batch}, seq_len = {length})
mesh (dp_shard = 64)
fsdp on dp_shard {{ layers.* = unit, root = unit }}
checkpoint {{ layers.* = {kept} }}
precision (param = bf16, reduce = fp32)
optimizer adamw(lr = 1e-4)
"""
        name = f"FSDP 64 Llama 70B {batch} {length} {row['ac']}"
        yield Case(name=name, files={"case.plan": text}, variant=None, gib=float(row["actual_gib"]))


def _asked(tool: str, case: Case, *, device: str = "cpu") -> dict[str, Any]:
    """A tool's answer and the processor time until it came; its error where there was none."""
    with tempfile.TemporaryDirectory() as place:
        for name, text in case.files.items():
            (Path(place) / name).write_text(text, encoding="utf-8")
        command = [sys.executable, __file__, "--ask", tool, str(Path(place) / "case.plan"), case.variant or "", device]
        with (Path(place) / "output").open("w+") as output, (Path(place) / "errors").open("w+") as errors:
            process = subprocess.Popen(
                command, stdout=output, stderr=errors, env={**os.environ, "TORCH_SHOW_CPP_STACKTRACES": "0"}
            )
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            for stream in (output, errors):
                stream.seek(0)
            answer, told = output.read(), errors.read()
    took = used.ru_utime + used.ru_stime
    if process.returncode == -signal.SIGXCPU:
        return {"error": f"no answer within {LIMIT_SECONDS} s of processor time"}
    if process.returncode:
        return {"error": _reason(told), "answer_s": took}
    return {**json.loads(answer.splitlines()[-1]), "answer_s": took}


def _reason(text: str) -> str:
    """The line of an error's output that tells what happened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = next((line for line in lines if line.startswith("what():")), None)
    return told or next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "no output")


def _ask(tool: str, path: Path, variant: str | None, *, device: str) -> dict[str, float]:
    import legoai

    if tool == "legoai":
        found = legoai.estimate(path, variant=variant)
        return {"gib": found.peak_active / GIB, "seconds": found.step_time}
    program = legoai.lower(path, variant=variant)
    return _ask_torch(tool, program.text, world=legoai.load(path, variant=variant).mesh.world_size, device=device)


def _ask_torch(tool: str, text: str, *, world: int, device: str) -> dict[str, float]:
    """Take two steps of a program under one of torch's tools, on fake tensors."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from legoai.cost.simulation import _patched_meshes
    from legoai.runtime import step as runtime_step
    from legoai.runtime.device import Device
    from legoai.runtime.step import OptimizerStep

    # Fake tensors have no values: the loss that ranks agree on, and the count of steps that Adam reads.
    runtime_step.sum_over_world = lambda values: [1.0] * len(values)
    sys.modules["torch.optim.adam"]._get_value = lambda value: 1.0
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile(text, "program.py", "exec"), namespace)
    trainer = namespace["trainer"]()

    def outside(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with unset_fake_temporarily():
                return function(*args)

        return call

    trainer = dataclasses.replace(
        trainer, build_mesh=outside(trainer.build_mesh), build_model=outside(trainer.build_model)
    )
    with _patched_meshes() if world > 1 else contextlib.nullcontext(), FakeTensorMode(allow_non_fake_inputs=True):
        where = Device(type=device, holds_values=False)
        training = trainer.prepare(where, seed=0)
        step, batches = OptimizerStep(trainer, training, where), _Batches(trainer)

        def take(index: int) -> None:
            step.update(step.gradient(index, batches, stop=False), step=index)

        if tool == "RuntimeEstimator":
            take(0)
            with RuntimeEstimator()("operator-level-cost-model") as estimator:
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


class _Batches:
    """Micro batches without values."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def next(self) -> Any:
        """What the model reads, and the targets."""
        import torch

        from legoai.runtime.data import SampleBatch

        reads, sizes = self.trainer.reads, (self.trainer.micro_batch, self.trainer.seq_len)

        def empty(item: Any) -> torch.Tensor:
            return torch.empty(item.shape, dtype=self.trainer.master_dtype if item.floating else torch.int64)

        return SampleBatch(inputs=tuple(map(empty, reads.inputs(*sizes))), targets=empty(reads.targets(*sizes)))

    def skip(self, batches: int) -> None:
        """Read nothing."""


def _document(rows: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    from legoai.cost.calibrate import processor_name

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
        f"median time to answer {found['median_answer_s']:.1f} s"
        for tool, found in document["memory"].items()
    )


def _write(document: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    lines = [
        f"# The simulator beside torch's own estimators ({document['date']})",
        "",
        f"{document['machine']}, torch {document['torch']}, Python {document['python']}, load average "
        f"{document['load_average']}. Peak memory in GiB, its error, and the processor time to answer from a cold "
        "start.",
        "`python benchmarks/torch_tools.py FOLDER --write`",
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
    for suffix, text in ((".json", json.dumps(document, indent=1) + "\n"), (".md", "\n".join(lines) + "\n")):
        temporary = RESULTS / f".torch_tools{suffix}.tmp"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(RESULTS / f"torch_tools{suffix}")


if __name__ == "__main__":
    sys.exit(main())
