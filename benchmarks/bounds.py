"""Lower bounds of the search against simulations of random candidates: `python -m benchmarks.bounds --minutes 10`.

Open plans are drawn (model, devices, length, which statements there are and which holes these have), and of each some
complete candidates. Each is simulated whole. Its bound, and those of plans in which some of its answers are holes
again, must not exceed what was simulated, in time and in memory; bounds are asked as the search asks, knowing what the
candidates before had to compute. Printed are how many were drawn and checked, what was violated, and how near the
bounds come: a bound is the better the nearer its share of the true cost is to 1.

`--write` adds the run to `results/bounds.json`; each row there names its seed and the state of the code.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import about_machine, write_rows
from benchmarks.validation.__main__ import code_digest

from legoai.cost.estimate import CannotEstimateError, estimate
from legoai.cost.search.bounds import BoundsOf
from legoai.cost.search.least_costs.shared_work import work_of_micro_batch
from legoai.cost.search.stages.costs import work_of_stages
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan
from legoai.lowering.program import LoweringError, lower

RESULTS = Path(__file__).parent / "results" / "bounds.json"
CANDIDATES_OF_ONE_PLAN = 6
PARTIAL = 4
"""Plans with fewer answers whose bounds are compared with one simulated candidate."""
ROUNDING = 1e-9
"""Share of a time by which sums in another order may differ."""

MODELS = (
    'llama3("1b", n_layers = {layers})',
    'llama3("8b", n_layers = {layers}, dim = 2048, n_heads = 16, hidden_dim = 4096)',
    'llama3("tiny", n_layers = {layers})',
    'gpt2("small", n_layers = {layers})',
    'mixtral("8x7b", n_layers = {layers}, dim = 1024, n_heads = 8, hidden_dim = 2048)',
)
CLUSTERS = (
    "h100_sxm(devices = 4)", "a100_sxm80(devices = 8)", "h200", "b200", "h100_sxm(hosts = 4, fabric = infiniband_ndr)",
)  # fmt: skip
CHECKPOINTS = (
    "none", "full", "every(2)", "selective([attention])", "selective([attention, matmul])",
    "selective([attention, alternate_matmul])",
)  # fmt: skip
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@dataclass(slots=True)
class Tally:
    """What was found.

    Attributes:
        plans: open plans that were drawn and lint clean.
        candidates: complete ones that were simulated.
        bounds: that were compared with these.
        illegal: candidates that the linter refuses.
        failed: candidates that cannot be simulated.
        violations: bounds above what was simulated, told in words.
        time: share of the simulated step that each candidate's own bound is.
        memory: likewise of the peak.
    """

    plans: int = 0
    candidates: int = 0
    bounds: int = 0
    illegal: int = 0
    failed: int = 0
    violations: list[str] = field(default_factory=list)
    time: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


def drawn_plan(draw: random.Random) -> str:
    """The text of a plan with holes."""
    model, cluster = draw.choice(MODELS), draw.choice(CLUSTERS)
    layers = draw.randint(2, 3)
    length = draw.choice((128, 512, 1024, 2048)) if "gpt2" not in model else draw.choice((128, 512, 1024))
    staged = draw.random() < 0.15
    sequences = 64 if "hosts" in cluster else 32
    statements = [
        "plan drawn",
        f"model {model.format(layers=layers)}",
        f"cluster {cluster}",
        f"batch (global = {sequences}, micro = auto in [1, 2, 4], seq_len = {length})",
    ]
    if staged:
        schedules = ", ".join(draw.sample(SCHEDULES, 3))
        statements += [
            "mesh (pp = auto in [1, 2], dp_shard = rest)",
            "fsdp blocks on dp_shard { layers.* = unit(reshard = auto in [after_backward, after_forward]) }",
            f"pipeline on pp (schedule = auto in [{schedules}])",
        ]
    elif draw.random() < 0.7:
        sharded = "mixtral" not in model and "gpt2" not in model
        statements += [
            f"mesh (dp_shard = rest, tp = {'auto in [1, 2, 4]' if sharded else '1'})",
            *(["shard standard on tp"] if sharded else []),
            "fsdp blocks on dp_shard { layers.* = unit(reshard = auto in [after_forward, after_backward, never]) }",
        ]
    else:
        statements += [
            "mesh (dp_replicate = auto in [1, 2, 4], dp_shard = rest)",
            "fsdp blocks on dp_replicate, dp_shard { layers.* = unit(reshard = auto in [after_forward, never]) }",
        ]
    statements.append(f"checkpoint {{ layers.* = auto in [{', '.join(draw.sample(CHECKPOINTS, 4))}] }}")
    statements.append(
        f"attention {draw.choice(('flash', 'efficient', 'math') if 'gpt2' in model else ('flash', 'math'))}"
    )
    statements.append(f"loss auto in [{', '.join(draw.sample(('eager', 'chunked(2)', 'chunked(4)'), 2))}]")
    if draw.random() < 0.7:
        statements.append("precision (param = auto in [bf16, fp32], reduce = fp32)")
    return "\n".join(statements) + "\n"


def check(draw: random.Random, tally: Tally, ends: float) -> Iterator[None]:
    """Draw a plan, and compare bounds with simulations of some of its candidates, one at each step."""
    text = drawn_plan(draw)
    linted = lint(text, "drawn.plan", directory=Path())
    if linted.has_errors:
        return
    plan, bounds = OpenPlan(linted, directory=Path()), BoundsOf()
    if plan.refused:
        return
    tally.plans += 1
    done = 0
    for _ in range(8 * CANDIDATES_OF_ONE_PLAN):
        if done == CANDIDATES_OF_ONE_PLAN or time.monotonic() > ends:
            return
        choices = [draw.randrange(len(hole.choices)) for hole in plan.holes]
        candidate = plan.candidate(choices)
        if candidate.errors or candidate.analysis is None or candidate.analysis.manifest is None:
            tally.illegal += 1
            continue
        partial = [choices]
        partial += [[None if draw.random() < 0.5 else index for index in choices] for _ in range(PARTIAL)]
        # Before the candidate itself is learned of, as the search does.
        found_bounds = [
            (kept, bounds(analysis)) for kept in partial if (analysis := plan.candidate(kept).analysis) is not None
        ]
        try:
            found = estimate(lower(candidate.analysis), candidate.plan, candidate.analysis.manifest)
        except (CannotEstimateError, LoweringError):
            tally.failed += 1
            continue
        bounds.shared.learn(candidate.analysis, work_of_micro_batch(found))
        bounds.shared.learn_blocks(candidate.analysis, work_of_stages(found, candidate.analysis.manifest).least)
        done += 1
        tally.candidates += 1
        for kept, least in found_bounds:
            tally.bounds += 1
            if least.step_time > found.step_time * (1 + ROUNDING) or least.memory > found.peak_active:
                tally.violations.append(
                    f"{text}{choices} as {kept}: {least} against {found.step_time} s, {found.peak_active} bytes"
                )
        tally.time.append(found_bounds[0][1].step_time / found.step_time)
        tally.memory.append(found_bounds[0][1].memory / found.peak_active)
        yield


def row_of(tally: Tally, seed: int, minutes: float) -> dict[str, Any]:
    """What a run found, as it is written."""
    shares = {
        f"{name}_share": {
            "mean": statistics.fmean(values),
            "median": statistics.median(values),
            "least": min(values),
            "most": max(values),
        }
        for name, values in (("time", tally.time), ("memory", tally.memory))
        if values
    }
    counts = {name: value for name, value in asdict(tally).items() if name not in ("time", "memory")}
    return {"seed": seed, "minutes": minutes, "code": code_digest(), **counts, **shares}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bounds", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--candidates", type=int, default=10_000, help="after which to stop")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    draw, tally = random.Random(options.seed), Tally()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch warns of simulated process groups
    begin = time.monotonic()
    ends = begin + 60.0 * options.minutes
    while time.monotonic() < ends and tally.candidates < options.candidates:
        for _ in check(draw, tally, ends):
            if tally.candidates >= options.candidates:
                break
    row = row_of(tally, options.seed, (time.monotonic() - begin) / 60)
    print(json.dumps(row, indent=1))
    if options.write:
        rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else []
        kept = [item for item in rows if (item["code"], item["seed"]) != (row["code"], row["seed"])]
        write_rows(RESULTS, about_machine(), [*kept, row])
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
