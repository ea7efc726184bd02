"""Error of the costs predicted for this machine's processor, against runs over gloo.

    python benchmarks/this_machine.py                the whole comparison: about six minutes on two idle cores
    python benchmarks/this_machine.py --memory       memory only, which does not depend on other load of the machine

First `legoai calibrate` measures the processor for 1, 2 and 4 ranks of the host, each with its share of the cores while
the others are busy too. Then the cost of every plan of `cpu_plans.py` is predicted with that profile, and its program
runs in as many processes. Nothing is fitted to the runs.

Peak memory is that of the tensors of rank 0 in the second step; the limit of its error is 2% for every plan. Time is
the median of the steps after the warm-up on rank 0; the limit of its error is 15% in the median over the plans.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from cpu_plans import PLANS, CpuPlan
from machine import write_page
from real_run import Real, run_program

import legoai
import legoai.runtime.training.trainer
from legoai.runtime.device import processor_name

MEMORY_LIMIT, TIME_LIMIT = 0.02, 0.15
RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Measure, predict and compare; the exit status is 1 where a limit is exceeded."""
    arguments = _arguments()
    names = [name for name in PLANS if not arguments.plans or any(part in name for part in arguments.plans)]
    started = time.perf_counter()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.profiles or Path(scratch)
        folder.mkdir(exist_ok=True, parents=True)
        if not arguments.memory:
            for world in sorted({PLANS[name].world for name in names}):
                _calibrate(folder, world, arguments.seconds)
        rows: list[dict[str, Any]] = []
        for name in names:
            rows.append(_row(name, folder, steps=0 if arguments.memory else arguments.steps))
            print(_line(rows[-1]), flush=True)
            document = _document(rows, load=load, seconds=time.perf_counter() - started)
            if arguments.write:
                _write(document, "this_machine_memory" if arguments.memory else "this_machine")
    return _verdict(document)


def _document(rows: list[dict[str, Any]], *, load: float, seconds: float) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "machine": processor_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_average_before": round(load, 2),
        "seconds": round(seconds),
        "plans": rows,
        **_summary(rows),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="*", metavar="NAME", help="only plans whose name contains NAME")
    parser.add_argument("--memory", action="store_true", help="measure memory only")
    parser.add_argument("--steps", type=int, default=4, help="timed steps, after two warm-up steps (default: 4)")
    parser.add_argument("--seconds", type=float, default=35.0, help="seconds of each calibration (default: 35)")
    parser.add_argument("--profiles", type=Path, help="folder of calibrations, which are reused where present")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/this_machine*.json and .md")
    return parser.parse_args()


def _calibrate(folder: Path, world: int, seconds: float) -> None:
    path = folder / f"ranks_{world}.toml"
    if not path.exists():
        command = ["calibrate", "--device", "cpu", "--processes", str(world), "--seconds", str(seconds), "-o", path]
        subprocess.run([sys.executable, "-m", "legoai", *command], check=True, stdout=subprocess.DEVNULL)


def _row(name: str, folder: Path, *, steps: int) -> dict[str, Any]:
    plan = PLANS[name]
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "here.plan"
        path.write_text(plan.text, encoding="utf-8")
        profile = folder / f"ranks_{plan.world}.toml" if steps else None
        predicted = _in_a_fork(_predict, path, plan.world, profile)
        real = run_program(legoai.lower(path).text, world=plan.world, steps=steps)[0]
    return {"plan": name, "ranks": plan.world, "model": plan.model, **_compared(plan, predicted, real)}


def _compared(plan: CpuPlan, predicted: dict[str, float], real: Real) -> dict[str, Any]:
    row: dict[str, Any] = {
        "sequences": plan.batch,
        "peak_measured_bytes": real.peak,
        "peak_predicted_bytes": int(predicted["peak"]),
        "memory_error": predicted["peak"] / real.peak - 1,
    }
    if "seconds" in predicted:
        row |= {
            "step_measured_s": real.median,
            "step_spread": (max(real.seconds) - min(real.seconds)) / real.median,
            "step_predicted_s": predicted["seconds"],
            "time_error": predicted["seconds"] / real.median - 1,
        }
    return row


def _predict(path: Path, world: int, profile: Path | None) -> dict[str, float]:
    """Predicted peak memory of rank 0, and with a profile the predicted step time."""
    if profile is None:
        from legoai.cost.capture import capture
        from legoai.cost.memory.storages import memory

        return {"peak": memory(capture(legoai.lower(path).text, world=world, kind="cpu")).peak}
    found = legoai.estimate(path, profile=str(profile))
    return {"peak": found.peak_active, "seconds": found.step_time}


def _in_a_fork(function: Any, *args: Any) -> Any:
    """Call a function in a forked process, since a process must not be forked any more after a backward in it."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=lambda: theirs.send(function(*args)), daemon=True)
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"memory": _errors([abs(row["memory_error"]) for row in rows])}
    times = [abs(row["time_error"]) for row in rows if "time_error" in row]
    if times:
        found["time"] = _errors(times)
    return found


def _errors(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "mean": statistics.fmean(values), "worst": max(values)}


def _line(row: dict[str, Any]) -> str:
    text = (
        f"{row['plan']:44} {row['ranks']} ranks  memory {row['peak_measured_bytes'] / 2**20:7.1f} MiB, predicted "
        f"{row['peak_predicted_bytes'] / 2**20:7.1f} ({row['memory_error']:+.2%})"
    )
    if "time_error" in row:
        text += (
            f"  step {row['step_measured_s']:.3f} s, predicted {row['step_predicted_s']:.3f} ({row['time_error']:+.1%})"
        )
    return text


def _verdict(document: dict[str, Any]) -> int:
    memory = document["memory"]
    print(f"memory: worst {memory['worst']:.2%} (limit {MEMORY_LIMIT:.0%}), median {memory['median']:.2%}")
    missed = memory["worst"] > MEMORY_LIMIT
    if "time" in document:
        took = document["time"]
        print(f"time: median {took['median']:.1%} (limit {TIME_LIMIT:.0%}), worst {took['worst']:.1%}")
        missed |= took["median"] > TIME_LIMIT
    print(f"{document['machine']}, torch {document['torch']}, load before {document['load_average_before']}")
    return int(missed)


def _write(document: dict[str, Any], name: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    lines = [
        f"# Predicted and measured costs of plans on a processor ({document['date']})",
        "",
        f"{document['machine']}, torch {document['torch']}, Python {document['python']}; load average before the run "
        f"{document['load_average_before']}. `python benchmarks/this_machine.py"
        f"{' --memory' if name.endswith('memory') else ''} --write`",
        "",
        "| plan | ranks | model | peak measured, MiB | predicted | error | step measured, s | predicted | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in document["plans"]:
        timed = (
            f"{row['step_measured_s']:.3f} | {row['step_predicted_s']:.3f} | {row['time_error']:+.1%}"
            if "time_error" in row
            else "– | – | –"
        )
        lines.append(
            f"| {row['plan']} | {row['ranks']} | {row['model']} | {row['peak_measured_bytes'] / 2**20:.1f} | "
            f"{row['peak_predicted_bytes'] / 2**20:.1f} | {row['memory_error']:+.2%} | {timed} |"
        )
    for kind in ("memory", "time"):
        if kind in document:
            found = document[kind]
            lines += ["", f"{kind}: median {found['median']:.2%}, mean {found['mean']:.2%}, worst {found['worst']:.2%}"]
    write_page(RESULTS / f"{name}.json", document, lines)


if __name__ == "__main__":
    sys.exit(main())
