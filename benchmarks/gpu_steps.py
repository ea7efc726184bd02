"""Measured steps of plans on one GPU: time, memory and kernels: `python -m benchmarks.gpu_steps -o FILE [NAME...]`.

Each plan of `gpu_plans.py` is lowered, and its program runs in a process of its own on random tokens that are made
before. Measured are, after the warm-up:

- seconds of single steps, between two moments at which the device is idle;
- peaks of torch's allocator in a step, active and reserved, and what the process takes of the device beside it;
- kernels of one more step, by torch's profiler: for each operator and the shapes of its operands, each kernel's name,
  number, and median microseconds. With `--traces FOLDER` the whole trace is written, which `legoai calibrate --from`
  reads;
- the clock and the power of the GPU, as its driver states them while steps run.

Nothing is predicted here: `gpu_error.py` compares predictions with `results/gpu_steps.json`, on any machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.gpu_plans import PLANS, GpuPlan
from benchmarks.machine import write_document
from benchmarks.real_run import RandomBatches

import legoai
from legoai.runtime.attention.kernel_choice import attention_kernel
from legoai.runtime.device import Device, processor_name
from legoai.runtime.metrics.profile import profiled, write_trace
from legoai.runtime.training.batches import Batches
from legoai.runtime.training.step import take_step

WARM_UP = 3
STEPS = 8
LEAST_SECONDS = 1.5
"""Steps are repeated for so long at least, so that the power limit has its effect on the clock."""
LEAST_SHARE = 1e-3
"""Of the time of all kernels, below which equal ones are left out."""
TIMEOUT_SECONDS = 150
_QUERY = "clocks.sm,power.draw,clocks_throttle_reasons.sw_power_cap,clocks_throttle_reasons.active"


def main() -> int:
    """Measure the plans one after the other; the exit status is 1 if one of them failed."""
    arguments = _arguments()
    names = [name for name in PLANS if not arguments.names or any(part in name for part in arguments.names)]
    rows: list[dict[str, Any]] = []
    for name in names:
        begin = time.perf_counter()
        rows.append(
            {
                "name": name,
                "plan": PLANS[name].text(device_here()),
                **_in_a_process(PLANS[name], name, arguments.traces),
            }
        )
        print(_line(rows[-1], time.perf_counter() - begin), flush=True)
        write_document(arguments.output, {**about(), "rows": rows})
    return int(any("failed" in row for row in rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only plans whose name contains NAME")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="write the measurements here")
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="write each plan's trace into a run's folder")
    return parser.parse_args()


def about() -> dict[str, Any]:
    """Date, devices and versions of a measurement."""
    asked = "name,driver_version,power.limit,clocks.max.sm,memory.total"
    said = subprocess.run(
        ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "gpu": dict(zip(asked.split(","), said.stdout.strip().split(", "), strict=False)),
        "processor": processor_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
    }


def device_here() -> str:
    """The GPU's name in the catalogue."""
    return "h200" if "H200" in str(about()["gpu"].get("name")) else "h100_sxm"


def _in_a_process(plan: GpuPlan, name: str, traces: Path | None) -> dict[str, Any]:
    """Measure a plan in a forked process, whose memory and errors are its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send, args=(theirs, plan, name, traces))
    process.start()
    theirs.close()
    try:
        found: dict[str, Any] = ours.recv() if ours.poll(TIMEOUT_SECONDS) else {"failed": "timeout"}
    except EOFError:
        found = {"failed": "the process ended"}
    process.join(5)
    process.kill()
    process.join()
    return found


def _send(pipe: Any, plan: GpuPlan, name: str, traces: Path | None) -> None:
    try:
        pipe.send(_measured(plan, name, traces))
    except Exception as error:
        import traceback

        traceback.print_exc()
        pipe.send({"failed": f"{type(error).__name__}: {error}"[:2000]})


def _measured(plan: GpuPlan, name: str, traces: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "here.plan"
        path.write_text(plan.text(device_here()), encoding="utf-8")
        namespace: dict[str, Any] = {"__name__": "program"}
        exec(compile(legoai.lower(path).text, "program.py", "exec"), namespace)
        trainer, device = namespace["trainer"](), Device(type="cuda")
        device.activate(allocator_settings=trainer.allocator_settings)
        os.environ["LOCAL_RANK"] = "0"
        store = f"file://{folder}/store"
        dist.init_process_group(device.collective_backend, init_method=store, rank=0, world_size=1)
        try:
            with attention_kernel(trainer.attention_kernel):
                return _steps(plan, trainer, device, name, traces)
        finally:
            dist.destroy_process_group()


def _steps(plan: GpuPlan, trainer: Any, device: Device, name: str, traces: Path | None) -> dict[str, Any]:
    training = trainer.prepare(device, seed=0)
    vocabulary = training.model.config.vocab_size
    source, taken = RandomBatches(plan.batch[1:], vocabulary, seed=0), 0

    def take() -> float:
        nonlocal taken
        device.synchronize()
        begin = time.perf_counter()
        take_step(trainer, training, Batches(training, source), step=taken)
        device.synchronize()
        taken += 1
        return time.perf_counter() - begin

    first = take()
    for _ in range(WARM_UP - 1):
        take()
    torch.cuda.reset_peak_memory_stats()
    take()
    memory = torch.cuda.memory_stats()
    free, whole = torch.cuda.mem_get_info()
    # Asking for the clock may slow steps that wait for the host: one took 75 ms before, and 98 meanwhile.
    unwatched = [take() for _ in range(STEPS)]
    seconds: list[float] = []
    with _watched() as samples:
        begin = time.perf_counter()
        while len(seconds) < STEPS or time.perf_counter() - begin < LEAST_SECONDS:
            seconds.append(take())
    folder = Path(tempfile.gettempdir()) / "legoai-trace" if traces is None else traces / _file_name(name)
    path = folder / "profile" / f"step-{taken}-rank-0.json"
    with profiled(device) as found:
        take()
    write_trace(found, path)
    return {
        "first_step_s": round(first, 3),
        "unwatched_step_s": [round(one, 6) for one in unwatched],
        "step_s": [round(one, 6) for one in seconds[-40:]],
        "peak_active_bytes": memory["active_bytes.all.peak"],
        "peak_allocated_bytes": memory["allocated_bytes.all.peak"],
        "peak_reserved_bytes": memory["reserved_bytes.all.peak"],
        "beside_allocator_bytes": whole - free - memory["reserved_bytes.all.current"],
        "sampled": list(samples),
        **_kernels(json.loads(path.read_text("utf-8"))),
    }


def _file_name(name: str) -> str:
    return re.sub(r"\W+", "_", name)


class _watched:  # noqa: N801 - a context manager
    """Samples of the GPU's clock and power by nvidia-smi, while entered."""

    def __enter__(self) -> list[str]:
        self.samples: list[str] = []
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", "-lms", "200"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return self.samples

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        said, _ = self.process.communicate()
        self.samples += said.splitlines()[-20:]


def _kernels(trace: dict[str, Any]) -> dict[str, Any]:
    """Kernels of a profiled step by operator and shapes, the seconds of all, and those from the first to the last."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    operators: dict[tuple[Any, Any], list[Any]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            operators[event["pid"], event["tid"]].append(event)
    innermost = {key: _innermost(group) for key, group in operators.items()}
    times: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    for kernel in kernels:
        launch = launches.get(kernel["args"].get("correlation"))
        find = None if launch is None else innermost.get((launch["pid"], launch["tid"]))
        operator = None if find is None or launch is None else find(launch["ts"])
        said = {} if operator is None else operator["args"]
        key = (
            "" if operator is None else operator["name"],
            json.dumps(said.get("Input Dims", [])),
            json.dumps(said.get("Input type", [])),
            kernel["name"][:160],
        )
        times[key].append(kernel["dur"])
    least = LEAST_SHARE * sum(kernel["dur"] for kernel in kernels)
    rows = [
        {"op": op, "shapes": shapes, "types": types, "kernel": name, "count": len(took), "us": statistics.median(took)}
        for (op, shapes, types, name), took in times.items()
        if sum(took) > least
    ]
    begin, end = (f(e["ts"] + d * e["dur"] for e in kernels) for f, d in ((min, 0), (max, 1)))
    return {
        "kernel_seconds": round(sum(e["dur"] for e in kernels) / 1e6, 6),
        "kernel_span_s": round((end - begin) / 1e6, 6),
        "kernel_count": len(kernels),
        "kernels": sorted(rows, key=lambda row: -row["count"] * row["us"]),
    }


def _innermost(events: list[Any]) -> Callable[[float], Any]:
    """Return a function from a moment to the innermost operator of a thread that ran then."""
    import bisect

    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    starts = [event["ts"] for event in events]

    def find(moment: float) -> Any:
        for index in _backwards(bisect.bisect_right(starts, moment)):
            if events[index]["ts"] + events[index]["dur"] >= moment:
                return events[index]
        return None

    return find


def _backwards(end: int) -> Iterator[int]:
    yield from range(end - 1, max(-1, end - 200), -1)


def _line(row: dict[str, Any], took: float) -> str:
    if "failed" in row:
        return f"{row['name']:48} failed: {row['failed'][:300]}"
    return (
        f"{row['name']:48} step {statistics.median(row['step_s']) * 1e3:8.2f} ms  kernels "
        f"{row['kernel_seconds'] * 1e3:8.2f} ms  active {row['peak_active_bytes'] / 2**30:6.2f} GiB  reserved "
        f"{row['peak_reserved_bytes'] / 2**30:6.2f} GiB  ({took:.0f} s)"
    )


if __name__ == "__main__":
    sys.exit(main())
