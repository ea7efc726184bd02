"""Lower bounds of the search against costs of random candidates: `python -m benchmarks.bounds --minutes 10`.

Open plans are drawn in families: model, devices, sequence length, statements, and the holes of these. Plans of a family
differ in depth, global batch, devices and memory limit, so that they share most captured programs. From every family
some complete candidates are drawn. Each candidate's cost comes from the search's evaluator, which composes its trace of
captured parts; where a bound is within 0.5% of its time, the tolerance of that composition, all of its blocks and micro
batches are timed instead. The candidate's own bound, and those of every plan on a random path from it to the plan with
all holes open, must not exceed that cost, in time and in memory. Bounds are computed as in the search, from the
compute and communication of earlier candidates. Under a memory limit they hold for candidates that fit.

The output has the numbers of drawn and checked plans, the violated bounds, and the tightness of bounds: a bound's share
of the true cost, at best 1.

Each family is drawn from the seed and its number, and checked in a process of its own, two at a time. With `--resume
FILE` each family's results are appended to that file, and a later run of the same seed and code continues after the
last family: `python -m benchmarks.bounds --minutes 25 --resume bounds.jsonl --write`.

`--write` adds the run to `results/bounds.json`; each row there names its seed and the version of the code.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.drawn_plans import drawn_family, opened
from benchmarks.drawn_styles import drawn_styles
from benchmarks.machine import about_machine, write_rows
from benchmarks.validation.__main__ import code_digest

from legoai.cost.estimate import CannotEstimateError, estimate
from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.lower_bounds.memory_bound_kernels import Moved, moved_of
from legoai.cost.search.lower_bounds.shared_work import MicroBatchWork, work_of_micro_batch
from legoai.cost.search.memory.points import MemoryPoints, memory_points
from legoai.cost.search.stages.costs import BlockWork, work_of_stages
from legoai.cost.simulated.forking import begin_forked
from legoai.dsl.open_plan import Candidate, OpenPlan
from legoai.lowering.program import LoweringError, lower
from legoai.specs.directives.checkpoint import Checkpoint
from legoai.specs.plan import Plan

RESULTS = Path(__file__).parent / "results" / "bounds.json"
CHOSEN = 4
"""Complete candidates drawn from each family."""
LIMITED = 5
"""Memory limits of each of these."""
LIMITS = (0.8, 0.9, 0.97, 1.0, 1.01, 1.02, 1.05, 1.1, 1.2, 1.3)
"""Memory limits, as shares of the peak of some candidate."""
STYLES = 40
"""Open styles checked for each candidate."""
JOBS = 2
"""Families checked at once."""
ROUNDING = 1e-9
"""Relative difference of sums in another order."""
COMPOSED = 0.005
"""Relative tolerance of a time composed of a few equal blocks, against the time of all of them."""


@dataclass(slots=True)
class Tally:
    """Counts and violations of a run.

    Attributes:
        families: families whose plan has no errors.
        plans: open plans among them.
        candidates: complete plans whose cost is known.
        costs: computed costs of candidates, which do not depend on memory limits.
        captured: different programs among them that were executed on the simulated device.
        bounds: bounds that were compared with these costs.
        beyond: candidates that exceed their memory limit; only their memory bounds are compared.
        illegal: candidates that the linter rejects.
        failed: candidates that cannot be simulated.
        taught: candidates whose bounds used the block costs of another candidate.
        kinds: candidates by feature: more than one rank on an axis, or an option that is not the default.
        violations: descriptions of bounds above the cost.
        time: each candidate's own time bound, as a share of its step time.
        memory: each candidate's own memory bound, as a share of its peak.
    """

    families: int = 0
    plans: int = 0
    candidates: int = 0
    costs: int = 0
    captured: int = 0
    bounds: int = 0
    beyond: int = 0
    illegal: int = 0
    failed: int = 0
    taught: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    time: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)

    def count_captured(self, done: str) -> None:
        """Count the events that an estimate reports."""
        self.captured += done.startswith("running")

    def add(self, other: Mapping[str, Any]) -> None:
        """Add another tally, given as plain data."""
        for name, value in other.items():
            own = getattr(self, name)
            if isinstance(own, dict):
                setattr(self, name, dict(Counter(own) + Counter(value)))
            else:
                setattr(self, name, own + value)


@dataclass(frozen=True, slots=True)
class Cost:
    """A candidate's cost, and the figures that the search uses for later bounds."""

    seconds: float
    peak: int
    micro_batch: MicroBatchWork
    moved: list[Moved]
    points: MemoryPoints
    blocks: Mapping[str, BlockWork]
    whole: bool

    @staticmethod
    def of(candidate: Candidate, tally: Tally, *, whole: bool) -> Cost | None:
        """The cost of a candidate; None where it cannot be simulated."""
        analysis = candidate.analysis
        assert analysis is not None
        assert analysis.manifest is not None
        try:
            found = estimate(
                lower(analysis), candidate.plan, analysis.manifest, whole=whole, progress=tally.count_captured
            )
        except (CannotEstimateError, LoweringError):
            tally.failed += 1
            return None
        blocks = work_of_stages(found, analysis.manifest).least
        moved = moved_of(found, analysis)
        work, points = work_of_micro_batch(found, analysis.manifest), memory_points(found, analysis.manifest)
        return Cost(found.step_time, found.peak_active, work, moved, points, blocks, found.whole)


Costs = dict[tuple[int, ...], Cost | None]
"""Costs of the candidates of a plan, which do not depend on the memory limit."""


def check(draw: random.Random, tally: Tally) -> Iterator[None]:
    """Draw a family, and compare bounds with the costs of some candidates of its plans; yield after each."""
    family = drawn_family(draw)
    plans = [(variant, plan) for variant in family.variants if (plan := opened(family, variant)) is not None]
    if not plans:
        return
    tally.families += 1
    chosen = list(itertools.islice(legal(draw, plans[0][1]), CHOSEN))
    chosen += treated_otherwise(draw, plans[0][1], chosen)
    for variant, plan in plans:
        costs: Costs = {}
        tally.plans += 1
        yield from compare(draw, tally, family.text(variant), plan, chosen, costs)
        tally.costs += sum(cost is not None for cost in costs.values())
        peaks = sorted({cost.peak for cost in costs.values() if cost is not None})
        for limit in {int(peak * draw.choice(LIMITS)) for peak in draw.sample(peaks, min(LIMITED, len(peaks)))}:
            limited = dataclasses.replace(variant, limit=limit)
            other = opened(family, limited)
            if other is not None:
                tally.plans += 1
                yield from compare(draw, tally, family.text(limited), other, chosen, costs, limit)


def legal(draw: random.Random, plan: OpenPlan) -> Iterator[tuple[int, ...]]:
    """Choices for the holes that the linter accepts, or a few others where it accepts hardly any."""
    for tried in range(10 * CHOSEN):
        choices = tuple(draw.randrange(len(hole.choices)) for hole in plan.holes)
        if any(hole.line is not None for hole in plan.holes):
            # Hardly any styles agree that are drawn one by one.
            choices = draw.choice([*drawn_styles(draw, plan, choices, tries=STYLES)] or [choices])
        if not plan.candidate(choices).errors or tried >= 9 * CHOSEN:
            yield choices


def treated_otherwise(
    draw: random.Random, plan: OpenPlan, chosen: Sequence[tuple[int, ...]]
) -> Iterator[tuple[int, ...]]:
    """Choices that differ from some candidate in the treatment of its blocks alone."""
    holes = [index for index, hole in enumerate(plan.holes) if hole.owner is Checkpoint]
    if not holes or not chosen:
        return
    choices, hole = draw.choice(chosen), draw.choice(holes)
    for value in range(len(plan.holes[hole].choices)):
        other = (*choices[:hole], value, *choices[hole + 1 :])
        if other not in chosen and not plan.candidate(other).errors:
            yield other


def compare(  # noqa: PLR0917
    draw: random.Random,
    tally: Tally,
    text: str,
    plan: OpenPlan,
    chosen: Sequence[tuple[int, ...]],
    costs: Costs,
    limit: float = math.inf,
) -> Iterator[None]:
    """Compare the bounds of some candidates of a plan, and of plans with more open holes, with their costs."""
    bounds, taught = BoundsOf(), False
    for choices in chosen:
        candidate = plan.candidate(choices)
        if candidate.errors or candidate.analysis is None or candidate.analysis.manifest is None:
            tally.illegal += 1
            continue
        # Before the candidate itself is learned of, as the search does.
        found_bounds = [
            (kept, bounds(analysis))
            for kept in path_to(draw, choices)
            if (analysis := plan.candidate(kept).analysis) is not None
        ]
        if choices not in costs:
            costs[choices] = Cost.of(candidate, tally, whole=False)
        cost = costs[choices]
        if cost is not None and not cost.whole:
            near = cost.seconds * (1 - COMPOSED)
            if cost.peak <= limit and any(least.step_time > near for _, least in found_bounds):
                cost = costs[choices] = Cost.of(candidate, tally, whole=True)
        if cost is None:
            continue
        tally.taught += taught
        taught = taught or bool(cost.moved)
        bounds.observe(candidate.analysis, cost.micro_batch, cost.moved, cost.points)
        bounds.shared.observe_blocks(candidate.analysis, cost.blocks)
        bounds.shortfalls.observe(candidate.analysis, cost.micro_batch, cost.seconds)
        tally.candidates += 1
        tally.kinds = dict(Counter(tally.kinds) + Counter(kinds_of(candidate.plan)))
        fits = cost.peak <= limit
        tally.beyond += not fits
        for kept, least in found_bounds:
            tally.bounds += 1
            late = fits and least.step_time > cost.seconds * (1 + ROUNDING)
            full = least.memory > cost.peak and (fits or math.isfinite(least.memory))
            if late or full:
                tally.violations.append(f"{text}{choices} as {kept}: {least} against {cost.seconds} s, {cost.peak} B")
        if fits:
            tally.time.append(found_bounds[0][1].step_time / cost.seconds)
            tally.memory.append(found_bounds[0][1].memory / cost.peak)
        yield


def path_to(draw: random.Random, choices: Sequence[int]) -> Iterator[list[int | None]]:
    """Yield a candidate, and then the plan with one more hole open each time, up to all holes."""
    kept: list[int | None] = list(choices)
    yield list(kept)
    for index in draw.sample(range(len(kept)), len(kept)):
        kept[index] = None
        yield list(kept)


def kinds_of(plan: Plan) -> list[str]:
    """Features of a candidate for `Tally.kinds`."""
    mesh = plan.mesh
    degrees = {"pp": mesh.pp, "dp_replicate": mesh.dp_replicate, "cp": mesh.cp, "tp": mesh.tp, "ep": mesh.ep}
    statements = plan.canonical()
    return [
        *(axis for axis, ranks in degrees.items() if ranks > 1),
        *(name for name in ("checkpoint", "comm", "loss", "offload", "require") if statements.get(name)),
    ]


def row_of(tally: Tally, seed: int, minutes: float) -> dict[str, Any]:
    """Row of a run in the file of results."""
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


def checked(work: tuple[int, int]) -> tuple[int, dict[str, Any]]:
    """The tally of the family of a seed and a number; runs in a process that ends afterwards."""
    seed, number = work
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch warns of simulated process groups
    tally = Tally()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for _ in check(random.Random(f"{seed} {number}"), tally):
            pass
    return number, asdict(tally)


def before(file: Path | None, seed: int) -> tuple[dict[int, Any], float]:
    """Results of a seed's families in earlier runs of the same code, and the minutes of these runs."""
    lines = file.read_text(encoding="utf-8").splitlines() if file is not None and file.exists() else []
    rows = [row for row in map(json.loads, lines) if (row["seed"], row["code"]) == (seed, code_digest())]
    return {row["number"]: row["found"] for row in rows}, sum(row["minutes"] for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bounds", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="limit of the run in minutes (default: 5)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the families (default: 1)")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"families checked at once (default: {JOBS})")
    parser.add_argument("--candidates", type=int, default=10_000, help="limit of candidates (default: 10000)")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="append results of families to FILE, and skip those already there"
    )
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    import legoai.cost.simulated.device  # noqa: F401 - once, and not in each process

    known, minutes = before(options.resume, options.seed)
    tally, code = Tally(), code_digest()
    for found in known.values():
        tally.add(found)
    begin = last = time.monotonic()
    ends = begin + 60.0 * options.minutes
    numbers = ((options.seed, number) for number in itertools.count() if number not in known)
    context = multiprocessing.get_context("fork")
    with context.Pool(options.jobs, begin_forked, (signal.SIG_IGN,), maxtasksperchild=1) as pool:
        running: list[Any] = []
        while tally.candidates < options.candidates and time.monotonic() < ends:
            while len(running) < options.jobs:
                running.append(pool.apply_async(checked, (next(numbers),)))
            running[0].wait(0.1)
            for one in [one for one in running if one.ready()]:
                running.remove(one)
                number, found = one.get()
                tally.add(found)
                now = time.monotonic()
                row = {"seed": options.seed, "code": code, "number": number, "minutes": (now - last) / 60}
                last = now
                if options.resume is not None:
                    with options.resume.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({**row, "found": found}) + "\n")
    row = row_of(tally, options.seed, minutes + (time.monotonic() - begin) / 60)
    print(json.dumps(row, indent=1))
    if options.write:
        rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else []
        kept = [item for item in rows if (item["code"], item["seed"]) != (row["code"], row["seed"])]
        write_rows(RESULTS, about_machine(), [*kept, row])
    if not tally.candidates:
        print("nothing was checked: a family takes longer than --minutes")
    return 1 if tally.violations or not tally.candidates else 0


if __name__ == "__main__":
    sys.exit(main())
