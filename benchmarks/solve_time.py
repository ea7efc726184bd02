"""Time of `legoai solve` in a cold process, and again, on worked plans with some values replaced by holes.

The time is that of a whole process, from its start to its exit, on both cores: the first has an empty cache, and the
second reuses the figures of the candidates that the first simulated. The output also has the numbers of candidates and
of simulated candidates, the remaining gap, and the objectives of the solution and of the worked plan. Where the search
is stopped, a third process with an empty cache goes on until it ends by itself.

    python benchmarks/solve_time.py [--write] [NAME ...]
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
RESULTS = ROOT / "benchmarks" / "results" / "solve_time.json"
STARTS = 2.0
"""Seconds of a process outside its search: imports, and work in progress when the search is stopped."""
TREATMENTS = "auto in [none, full, every(2), selective([attention, matmul])]"


@dataclass(frozen=True, slots=True)
class Case:
    """A worked plan, the replacements in its text, and its limits.

    Attributes:
        plan: name of the plan.
        holes: patterns in its text, and their replacements.
        cold: limit of the first process, in seconds.
        again: limit of the second process, in seconds.
        gap: limit of the remaining gap.
        stops: whether the search is stopped before ``cold`` seconds are over, as it would not end by then.
        what: suffix that distinguishes the case from others of the same plan.
    """

    plan: str
    holes: tuple[tuple[str, str], ...]
    cold: float
    again: float
    gap: float = 0.005
    stops: bool = False
    what: str = ""

    @property
    def name(self) -> str:
        """Name of the case."""
        return f"{self.plan} {self.what}".strip()


CASES = (
    Case(
        "llama3_8b_8",
        (
            (r"micro = 1", "micro = auto in [1, 2, 4]"),
            (r"layers\.\*( *)= unit\(reshard = after_backward\)", r"layers.*\1= unit(reshard = auto)"),
            (r"layers\.\* = selective\(\[attention, matmul\]\)", f"layers.* = {TREATMENTS}"),
        ),
        15.0,
        3.0,
    ),
    Case(
        "llama3_70b_256",
        (
            (r"micro = 16", "micro = auto in [1, 2, 4, 8, 16]"),
            (r"mesh \(dp_shard = hosts, tp = 8\)", "mesh (dp_shard = rest, tp = auto in [1, 2, 4, 8])"),
            (r"layers\.\* = full", f"layers.* = {TREATMENTS}"),
        ),
        30.0,
        3.0,
    ),
    Case(
        "llama3_70b_256",
        (
            (r"micro = 16", "micro = auto"),
            (
                r"mesh \(dp_shard = hosts, tp = 8\)",
                "mesh (pp = auto, dp_replicate = auto, dp_shard = rest, cp = auto, tp = auto)\n"
                "context on cp\npipeline on pp (schedule = auto)\nloss auto",
            ),
            (r"fsdp blocks on dp_shard", "fsdp blocks on dp_replicate, dp_shard { layers.* = unit(reshard = auto) }"),
            (r"layers\.\* = full", "layers.* = auto"),
        ),
        30.0,
        3.0,
        stops=True,
        what="with every hole",
    ),
    Case(
        "llama3_8b_8",
        (
            (r"micro = 1", "micro = auto in [1, 2, 4]"),
            (r"layers\.\*( *)= unit\(reshard = after_backward\)", r"layers.*\1= unit(reshard = auto)"),
            (r"layers\.\* = selective\(\[attention, matmul\]\)", f"layers.* = {TREATMENTS}"),
            (r"\nattention  flash", r"\nattention  flash\ncompile { layers.* = inductor }"),
        ),
        60.0,
        3.0,
        what="compiled",
    ),
    Case(
        "llama3_8b_8",
        (
            (r"micro = 1", "micro = auto"),
            (
                r"mesh *\(dp_shard = 8\)",
                "mesh (pp = auto, dp_shard = auto, tp = auto)\npipeline on pp (schedule = auto)\nshard auto on tp",
            ),
            (r"layers\.\*( *)= unit\(reshard = after_backward\)", r"layers.*\1= unit(reshard = auto)"),
            (r"layers\.\* = selective\(\[attention, matmul\]\)", "layers.* = auto"),
        ),
        30.0,
        3.0,
        stops=True,
        what="with every hole",
    ),
    Case(
        "llama3_405b_512",
        (
            (r"global = 256, micro = 1", "global = 256, micro = auto in [1, 2]"),
            (r"mesh \(pp = 16, dp_shard = 4, tp = 8\)", "mesh (pp = auto in [8, 16], dp_shard = rest, tp = 8)"),
            (r"layers\.\* = selective\(\[attention\]\)", "layers.* = auto in [none, full, selective([attention])]"),
        ),
        90.0,
        3.0,
    ),
)


def holed(case: Case) -> str:
    """Text of a worked plan with holes."""
    text = (ROOT / "plans" / f"{case.plan}.plan").read_text(encoding="utf-8")
    for pattern, hole in case.holes:
        text, count = re.subn(pattern, hole, text)
        if count != 1:
            raise SystemExit(f"{case.plan}.plan has {count} places of `{pattern}`")
    return text


def called(folder: str, *arguments: str) -> tuple[dict[str, Any], float]:
    """The JSON output of a `legoai` command, and its elapsed seconds."""
    start = time.perf_counter()
    found = legoai(*arguments, cache=folder)
    return found, time.perf_counter() - start


def measured(case: Case) -> dict[str, Any]:
    """Solve a plan twice, and predict the cost of the worked plan."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{case.plan}.plan"
        path.write_text(holed(case), encoding="utf-8")
        called(folder, "cost", "plans/tiny.plan")  # which compiles what is imported
        limit = ("--time-limit", f"{case.cold - STARTS:.0f}") if case.stops else ()
        solved, cold = called(folder, "solve", str(path), *limit)
        _, again = called(folder, "solve", str(path), *limit)
        ended = called(f"{folder}/whole", "solve", str(path)) if case.stops else None
        present, _ = called(folder, "cost", f"plans/{case.plan}.plan")
    row = {
        "plan": case.name,
        "cold_s": cold,
        "again_s": again,
        "limits_s": [case.cold, case.again],
        "status": solved["status"],
        "gap": solved["gap"],
        "candidates": solved["candidates"],
        "choices": {item["hole"]: item["value"] for item in solved["choices"]},
        "step_time_s": solved["objective"]["value"],
        "present_step_time_s": present["step_time_s"],
    }
    if ended is not None:
        found, seconds = ended
        row["ended"] = {"seconds": seconds, "gap": found["gap"], "step_time_s": found["objective"]["value"]}
    return row


def main() -> int:
    """Measure and print; the exit status is 0 where the limits are met."""
    asked = ask(__doc__, RESULTS)
    rows, kept = [], True
    for case in CASES:
        if not asked.has(case.name):
            continue
        row = measured(case)
        within = row["cold_s"] <= case.cold and row["again_s"] <= case.again and row["gap"] <= case.gap
        kept = kept and within
        counts = row["candidates"]
        print(
            f"{case.name:<32} {row['cold_s']:6.1f} s cold (limit {case.cold:.0f}), {row['again_s']:5.1f} s again "
            f"(limit {case.again:.0f}){'' if within else ', MISSED'}; {counts['simulated']} of {counts['enumerated']} "
            f"candidates simulated, gap {row['gap']:.1%}; step {row['step_time_s']:.2f} s, "
            f"{row['present_step_time_s']:.2f} s as the plan is",
            flush=True,
        )
        if "ended" in row:
            seconds, gap, step = (row["ended"][name] for name in ("seconds", "gap", "step_time_s"))
            print(f"  ended by itself after {seconds:.0f} s: step {step:.2f} s, gap {gap:.2%}", flush=True)
        rows.append(row)
    asked.save(rows)
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
