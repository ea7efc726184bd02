"""Step time under the split into stages that `legoai solve` finds, against even splits.

Plans with a pipeline are solved with `split = auto`, and nothing else open. The results are the simulated step time of
each split tried, the lower bound of all splits, and the time of solving in a process with an empty cache.

    python benchmarks/stage_split.py [--write] [NAME ...]
"""

from __future__ import annotations

import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import ask, legoai

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "stage_split.json"


@dataclass(frozen=True, slots=True)
class Case:
    """A worked plan, and the replacements in its text."""

    name: str
    plan: str
    replaced: tuple[tuple[str, str], ...]


CASES = (
    Case(
        "8B on 8, 1F1B over 4 ranks",
        "llama3_8b_8",
        (
            (r"mesh *\(dp_shard = 8\)", "mesh (pp = 4, dp_shard = 2)\npipeline on pp (schedule = 1F1B, split = auto)"),
            (r"global = \d+", "global = 32"),
            (r"require [^\n]*\n", ""),
        ),
    ),
    Case(
        "70B on 256, 1F1B over 8 ranks",
        "llama3_70b_256",
        (
            (
                r"mesh \(dp_shard = hosts, tp = 8\)",
                "mesh (pp = 8, dp_shard = 4, tp = 8)\npipeline on pp (schedule = 1F1B, split = auto)",
            ),
            (r"micro = 16", "micro = 1"),
            (r"fsdp blocks on dp_shard[^\n]*", "fsdp blocks on dp_shard { layers.* = unit(reshard = after_backward) }"),
            (r"require [^\n]*\n", ""),
        ),
    ),
    Case(
        "405B on 512, 1F1B over 16 ranks",
        "llama3_405b_512",
        (
            (r"schedule = Interleaved1F1B\n *stages   = 32[^\n]*", "schedule = 1F1B, split = auto"),
            (r"\n# The last phase(.|\n)*", "\n"),
        ),
    ),
)


def holed(case: Case) -> str:
    """Text of a plan whose split is a hole."""
    text = (ROOT / "plans" / f"{case.plan}.plan").read_text(encoding="utf-8")
    for pattern, value in case.replaced:
        text, count = re.subn(pattern, value, text)
        if not count:
            raise SystemExit(f"{case.plan}.plan has no `{pattern}`")
    return text


def measured(case: Case) -> dict[str, Any]:
    """Solve a plan, and list every split that was tried."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{case.plan}.plan"
        path.write_text(holed(case), encoding="utf-8")
        start = time.perf_counter()
        found = legoai("solve", str(path), "--all", cache=folder)
        elapsed = time.perf_counter() - start
    return {
        "case": case.name,
        "solve_s": elapsed,
        "status": found["status"],
        "bound_s": found["bound"],
        "gap": found["gap"],
        "splits": [
            {
                "split": item["choices"][0]["value"],
                "step_time_s": item["step_time_s"],
                "bubble_fraction": item["bubble_fraction"],
                "peak_active_gib": item["peak_active_bytes"] / 2**30,
                "verdict": item["verdict"],
            }
            for item in found["all"]
        ],
    }


def main() -> None:
    """Measure and print."""
    asked = ask(__doc__, RESULTS)
    rows = []
    for case in CASES:
        if not asked.has(case.name):
            continue
        row = measured(case)
        best, *_ = row["splits"]
        print(f"{case.name}: {row['solve_s']:.0f} s, gap {row['gap']:.1%}")
        for item in row["splits"]:
            more = item["step_time_s"] / best["step_time_s"] - 1.0
            print(f"  {item['step_time_s']:7.3f} s  {more:+6.1%}  {item['split']}  {item['verdict']}", flush=True)
        rows.append(row)
    asked.save(rows)


if __name__ == "__main__":
    main()
