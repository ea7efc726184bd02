"""Candidates that `legoai solve` evaluates per second once their parts are captured.

A sample of the legal candidates of the plans of `solve_time.py` is simulated twice in processes on all cores: first
with an empty cache, and again with the parts that the first run captured. The time of the second run counts, from the
lowered candidate to its figures, without the processes' start; linting and bounds are timed separately.

    python benchmarks/candidates_per_second.py [--write] [--sample N] [NAME ...]
"""

from __future__ import annotations

import itertools
import os
import random
import tempfile
import time
from typing import Any, Final

from machine import ask
from solve_time import CASES, ROOT, Case, holed

from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.evaluation.evaluator import Figures, Simulation
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan

RESULTS: Final = ROOT / "benchmarks" / "results" / "candidates_per_second.json"
LEAST: Final = 200
"""Limit: least candidates per second."""


def legal(case: Case, count: int) -> tuple[list[Analysis], float, float]:
    """A sample of a plan's legal candidates, and milliseconds to lint and to bound one."""
    plan = OpenPlan(lint(holed(case), f"{case.plan}.plan", directory=ROOT / "plans"), directory=ROOT / "plans")
    ways = list(itertools.product(*(range(hole.listed) for hole in plan.holes)))
    random.Random(0).shuffle(ways)
    found, bounds = [], BoundsOf()
    linting = bounding = 0.0
    tried = 0
    for way in ways:
        tried += 1
        start = time.perf_counter()
        candidate = plan.candidate(way)
        linting += time.perf_counter() - start
        if candidate.errors or candidate.analysis is None:
            continue
        start = time.perf_counter()
        bounds(candidate.analysis)
        bounding += time.perf_counter() - start
        found.append(candidate.analysis)
        if len(found) == count:
            break
    return found, linting / tried * 1e3, bounding / len(found) * 1e3


def measured(case: Case, count: int) -> dict[str, Any]:
    """Evaluate a sample twice."""
    candidates, linting, bounding = legal(case, count)
    with Simulation(directory=ROOT / "plans") as evaluator:
        start = time.perf_counter()
        first = list(evaluator.evaluate(candidates, None))
        capturing = time.perf_counter() - start
        evaluator.kept.clear()
        start = time.perf_counter()
        again = list(evaluator.evaluate(candidates, None))
        took = time.perf_counter() - start
    assert [item.metrics for item in first if isinstance(item, Figures)] == [
        item.metrics for item in again if isinstance(item, Figures)
    ]
    return {
        "plan": case.plan,
        "candidates": len(candidates),
        "composed": sum(isinstance(item, Figures) and not item.whole for item in again),
        "with_capture_s": capturing,
        "after_capture_s": took,
        "candidates_per_second": len(candidates) / took,
        "lint_ms": linting,
        "bounds_ms": bounding,
    }


def main() -> int:
    """Measure and print; the exit status is 0 where the limit is met."""
    asked = ask(__doc__, RESULTS, sample=(16, "candidates of each plan (default: 16)"))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        for case in CASES:
            if asked.has(case.plan) and not case.stops:  # a plan that is stopped has too many candidates to draw from
                row = measured(case, asked.options.sample)
                print(
                    f"{case.plan:<16} {row['candidates_per_second']:6.1f} candidates per second after capture (limit: "
                    f"{LEAST}), {row['composed']} of {row['candidates']} composed; with capture "
                    f"{row['with_capture_s']:.1f} s; lint {row['lint_ms']:.1f} ms, bounds {row['bounds_ms']:.1f} ms",
                    flush=True,
                )
                rows.append(row)
    asked.save(rows)
    return 0 if all(row["candidates_per_second"] >= LEAST for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
