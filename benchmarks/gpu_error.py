"""Error of the costs predicted for one H100 and one H200, against `results/gpu_steps*.json`.

Needs no GPU: `python -m benchmarks.gpu_error`. `gpu_steps.py` measured the plans on either; no whole step is used in a
fit, but what the power limit costs long kernels, of the H100's plans of 16 layers (`fit_gpu.py`). Of an H200 only
memory-bound kernels were measured alone; its products and attention are the H100's. Time is the median step between
two moments at which the device is idle. Memory is the peak of the allocator; the measured one includes two workspaces
of cuBLAS, of 32 MiB each. With `--write` the results are written to `results/gpu_error.json` and `.md`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import about_machine, write_page

import legoai

RESULTS = Path(__file__).parent / "results"
MEASURED = ("gpu_steps.json", "gpu_steps_h200.json")
WORKSPACES = 2 * 32 * 2**20
MIB, MS = 2**20, 1e-3


def main() -> int:
    """Compare all plans and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write results/gpu_error.json and .md")
    write = parser.parse_args().write
    lines = [
        "# Predicted and measured steps of one GPU",
        "",
        "`python -m benchmarks.gpu_error --write`, of what `gpu_steps.py` measured.",
        "",
        "Busy is the share of the step in which kernels run; where it is small the host limits the step.",
    ]
    parts = []
    for name in MEASURED:
        measured = json.loads((RESULTS / name).read_text("utf-8"))
        rows = [_row(row) for row in measured["rows"]]
        lines += _part(measured, rows)
        where = {key: measured[key] for key in ("date", "gpu", "processor", "torch", "cuda", "python")}
        parts.append({"measured": where, "rows": rows})
    print("\n".join(lines))
    if write:
        write_page(RESULTS / "gpu_error.json", {**about_machine(), "devices": parts}, lines)
    return 0


def _row(row: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "here.plan"
        path.write_text(row["plan"], encoding="utf-8")
        found = legoai.estimate(path)
    pairs = {
        "step_s": (statistics.median(row["step_s"]), found.step_time),
        "peak_active_bytes": (row["peak_active_bytes"], found.peak_active + WORKSPACES),
        "peak_reserved_bytes": (row["peak_reserved_bytes"], found.peak_reserved),
    }
    return {
        "name": row["name"],
        "kernel_share": row["kernel_seconds"] / pairs["step_s"][0],
        **{key: {"measured": real, "predicted": ours, "error": ours / real - 1} for key, (real, ours) in pairs.items()},
    }


def _part(measured: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """The table of one device, and its errors."""
    gpu = measured["gpu"]
    lines = [
        "",
        f"## {gpu['name']}, {measured['date']}",
        "",
        f"Driver {gpu['driver_version']}, torch {measured['torch']}, Python {measured['python']}, "
        f"{measured['processor']}.",
        "",
        "| plan | busy | step, ms | predicted | error | peak active, MiB | error | peak reserved, MiB | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        step, active, reserved = (row[key] for key in ("step_s", "peak_active_bytes", "peak_reserved_bytes"))
        lines.append(
            f"| {row['name']} | {row['kernel_share']:.0%} | {step['measured'] / MS:.1f} | "
            f"{step['predicted'] / MS:.1f} | {step['error']:+.1%} | {active['measured'] / MIB:.0f} | "
            f"{active['error']:+.2%} | {reserved['measured'] / MIB:.0f} | {reserved['error']:+.1%} |"
        )
    busy = [row for row in rows if row["kernel_share"] > BUSY]
    lines.append("")
    for label, key, some in (
        ("step time", "step_s", rows),
        (f"step time where kernels run for more than {BUSY:.0%} of it", "step_s", busy),
        ("peak active", "peak_active_bytes", rows),
        ("peak reserved", "peak_reserved_bytes", rows),
    ):
        errors = [row[key]["error"] for row in some]
        sizes = sorted(map(abs, errors))
        lines.append(
            f"- {label}, {len(sizes)} plans: mean error {statistics.fmean(sizes):.2%}, median "
            f"{statistics.median(sizes):.2%}, worst {sizes[-1]:.1%}, bias {statistics.fmean(errors):+.2%}"
        )
    return lines


BUSY = 0.9

if __name__ == "__main__":
    sys.exit(main())
