"""Lower bounds of the search against costs of random candidates: `python -m benchmarks.bounds --minutes 10`.

Open plans are drawn (model, devices, length, which statements there are and which holes these have) in families: plans
of a family differ in depth, global batch, devices and limit of memory, and in little that has to be captured anew for
each of them. Of every family some complete candidates are drawn. Each has a cost, as the search's evaluator gives it,
in a trace that is composed of what was captured; where a bound comes within 0.5% of its time, which is how far
composition may be off, all of its blocks and micro batches are timed. Its own bound, and those of every plan on a
random path from it to the plan with all holes open, must not exceed that cost, in time and in memory. Bounds are asked
as the search asks, knowing what the candidates before had to compute. Where memory is limited they hold for what fits.
Printed are how many were drawn and checked, what was violated, and how near the bounds come: a bound is the better the
nearer its share of the true cost is to 1.

`--write` adds the run to `results/bounds.json`; each row there names its seed and the state of the code.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import about_machine, write_rows
from benchmarks.validation.__main__ import code_digest

from legoai.cost.estimate import CannotEstimateError, estimate
from legoai.cost.search.bounds import BoundsOf
from legoai.cost.search.least_costs.shared_work import MicroBatchWork, work_of_micro_batch
from legoai.cost.search.stages.costs import BlockWork, work_of_stages
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import Candidate, OpenPlan
from legoai.lowering.program import LoweringError, lower

RESULTS = Path(__file__).parent / "results" / "bounds.json"
CHOSEN = 4
"""Ways to fill the holes that are drawn of each family."""
VARIANTS = 10
"""Plans of a family without limits of memory; a pipeline, all of which is captured anew, has one."""
LIMITED = 3
"""Limits of memory of each of these."""
LIMITS = (0.97, 1.0, 1.02, 1.1, 1.3)
"""Of the peak of some candidate."""
STAGED = 0.08
"""Share of the families that are pipelines."""
ROUNDING = 1e-9
"""Share of a time by which sums in another order may differ."""
COMPOSED = 0.005
"""Share by which a time that is composed of a few equal blocks may differ from that of all of them."""

MODELS = (
    'llama3("1b", n_layers = {layers})',
    'llama3("8b", n_layers = {layers}, dim = 2048, n_heads = 16, hidden_dim = 4096)',
    'llama3("tiny", n_layers = {layers})',
    'gpt2("small", n_layers = {layers})',
    'mixtral("8x7b", n_layers = {layers}, dim = 1024, n_heads = 8, hidden_dim = 2048)',
)
CLUSTERS = {
    4: ("h100_sxm(devices = 4)", "a100_sxm80(devices = 4)", "h200(devices = 4)", "b200(devices = 4)"),
    8: ("h100_sxm", "a100_sxm80", "h200", "b200", "h100_sxm(hosts = 2, devices = 4, fabric = infiniband_ndr)"),
    32: (
        "h100_sxm(hosts = 4, fabric = infiniband_ndr)", "a100_sxm80(hosts = 4, fabric = infiniband_hdr)",
        "h200(hosts = 4, fabric = roce_400)", "h100_sxm(hosts = 4, fabric = ethernet_100)",
    ),
}  # fmt: skip
"""Devices by their number."""
CHECKPOINTS = (
    "none", "full", "every(2)", "selective([attention])", "selective([attention, matmul])",
    "selective([attention, alternate_matmul])",
)  # fmt: skip
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@dataclass(slots=True)
class Tally:
    """What was found.

    Attributes:
        families: of plans that lint clean.
        plans: open plans among them.
        candidates: complete ones whose cost is known.
        costs: of candidates that were computed; a limit of memory does not change them.
        captured: different programs among them that were run on the simulated device.
        bounds: that were compared with these costs.
        beyond: candidates that exceed their limit of memory; of their bounds that of memory alone is compared.
        illegal: candidates that the linter refuses.
        failed: candidates that cannot be simulated.
        violations: bounds above the cost, told in words.
        time: share of the step that each candidate's own bound is.
        memory: likewise of the peak.
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
    violations: list[str] = field(default_factory=list)
    time: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)

    def count_captured(self, done: str) -> None:
        """Take note of what an estimate does."""
        self.captured += done.startswith("running")


@dataclass(frozen=True, slots=True)
class Variant:
    """What plans of a family differ in: number of blocks, sequences of a step, devices, and bytes of the limit."""

    layers: int
    sequences: int
    cluster: str
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """Plans with the same holes and the same programs but for what a :class:`Variant` says.

    Attributes:
        model: its statement, without the number of blocks.
        batch: what else the statement says than the sequences of a step.
        others: further statements.
        variants: without limits of memory.
    """

    model: str
    batch: str
    others: tuple[str, ...]
    variants: tuple[Variant, ...]

    def text(self, one: Variant) -> str:
        """The text of a plan."""
        lines = (
            "plan drawn",
            f"model {self.model.format(layers=one.layers)}",
            f"cluster {one.cluster}",
            f"batch (global = {one.sequences}, {self.batch})",
            *self.others,
            *([] if one.limit is None else [f"require peak_memory <= {one.limit}B"]),
        )
        return "\n".join(lines) + "\n"


def drawn_family(draw: random.Random) -> Family:
    """Some plans with holes."""
    model, staged = draw.choice(MODELS), draw.random() < STAGED
    length = draw.choice((128, 512, 1024, 2048)) if "gpt2" not in model else draw.choice((128, 512, 1024))
    devices = draw.choice((4, 8)) if staged else draw.choice((4, 8, 8, 32))
    if staged:
        schedules = ", ".join(draw.sample(SCHEDULES, 3))
        others = [
            "mesh (pp = auto in [1, 2], dp_shard = rest)",
            "fsdp blocks on dp_shard { layers.* = unit(reshard = auto in [after_backward, after_forward]) }",
            f"pipeline on pp (schedule = auto in [{schedules}])",
        ]
    elif draw.random() < 0.7:
        sharded = "mixtral" not in model and "gpt2" not in model
        others = [
            f"mesh (dp_shard = rest, tp = {'auto in [1, 2, 4]' if sharded else '1'})",
            *(["shard standard on tp"] if sharded else []),
            "fsdp blocks on dp_shard { layers.* = unit(reshard = auto in [after_forward, after_backward, never]) }",
        ]
    else:
        others = [
            "mesh (dp_replicate = auto in [1, 2, 4], dp_shard = rest)",
            "fsdp blocks on dp_replicate, dp_shard { layers.* = unit(reshard = auto in [after_forward, never]) }",
        ]
    others.append(f"checkpoint {{ layers.* = auto in [{', '.join(draw.sample(CHECKPOINTS, 4))}] }}")
    others.append(f"attention {draw.choice(('flash', 'efficient', 'math') if 'gpt2' in model else ('flash', 'math'))}")
    others.append(f"loss auto in [{', '.join(draw.sample(('eager', 'chunked(2)', 'chunked(4)'), 2))}]")
    if draw.random() < 0.7:
        others.append("precision (param = auto in [bf16, fp32], reduce = fp32)")
    if not staged and draw.random() < 0.3:
        others.append("comm (prefetch = auto in [implicit, units(2, 2)])")
    if not staged and draw.random() < 0.2:
        others.append("offload (optimizer = auto in [none, all])")
    # Deeper ones have the trace of one capture, and so have three micro batches and more.
    depths = (2, 3) if staged else draw.choice(((2, 3), (6, 7, 8, 9, 10, 12, 16), (6, 7, 8, 9, 10, 12, 16)))
    batches = (4, 8) if staged else draw.choice(((2,), (4,), (20, 24, 32, 40, 48)))
    every = [
        Variant(layers, devices * batch, cluster)
        for layers in depths
        for batch in batches
        for cluster in CLUSTERS[devices]
    ]
    variants = draw.sample(every, 1 if staged else min(VARIANTS, len(every)))
    return Family(model, f"micro = auto in [1, 2, 4], seq_len = {length}", tuple(others), tuple(variants))


def opened(family: Family, variant: Variant) -> OpenPlan | None:
    """A plan of a family; None of one that is not legal."""
    linted = lint(family.text(variant), "drawn.plan", directory=Path())
    plan = None if linted.has_errors else OpenPlan(linted, directory=Path())
    return None if plan is None or plan.refused else plan


@dataclass(frozen=True, slots=True)
class Cost:
    """What a candidate costs, and what a search learns of it."""

    seconds: float
    peak: int
    micro_batch: MicroBatchWork
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
        return Cost(found.step_time, found.peak_active, work_of_micro_batch(found), blocks, found.whole)


Costs = dict[tuple[int, ...], Cost | None]
"""Costs of the candidates of a plan, which are the same under every limit of memory."""


def check(draw: random.Random, tally: Tally) -> Iterator[None]:
    """Draw a family, and compare bounds with the costs of some candidates of its plans, one at each step."""
    family = drawn_family(draw)
    plans = [(variant, plan) for variant in family.variants if (plan := opened(family, variant)) is not None]
    if not plans:
        return
    tally.families += 1
    chosen = [tuple(draw.randrange(len(hole.choices)) for hole in plans[0][1].holes) for _ in range(CHOSEN)]
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


def compare(  # noqa: PLR0917
    draw: random.Random,
    tally: Tally,
    text: str,
    plan: OpenPlan,
    chosen: Sequence[tuple[int, ...]],
    costs: Costs,
    limit: float = math.inf,
) -> Iterator[None]:
    """Compare the bounds of some candidates of a plan, and of plans with fewer answers, with their costs."""
    bounds = BoundsOf()
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
        bounds.shared.learn(candidate.analysis, cost.micro_batch)
        bounds.shared.learn_blocks(candidate.analysis, cost.blocks)
        tally.candidates += 1
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
    """A candidate, and with one answer less each time what is open above it, to all holes."""
    kept: list[int | None] = list(choices)
    yield list(kept)
    for index in draw.sample(range(len(kept)), len(kept)):
        kept[index] = None
        yield list(kept)


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
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        while time.monotonic() < ends and tally.candidates < options.candidates:
            for _ in check(draw, tally):
                if time.monotonic() > ends or tally.candidates >= options.candidates:
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
