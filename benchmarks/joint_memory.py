"""Recomputation, unsharded parameters and offloading decided jointly, greedily, and one after the other.

The memory and time of blocks are observed in plans with equal treatments of all blocks, as in `legoai solve`. Under
each of a grid of limits of reserved memory three methods choose from them: the integer program; the greedy method; and
one decision after the other: the least recomputation that fits, then unsharded parameters in the memory left, and
offloading of the optimizer's state where nothing fits otherwise. Each choice is simulated, its predicted memory is
corrected by the difference, and the method repeats until its choice no longer changes. The results are the best
simulated step of each method within the limit, and the share of the limit that it leaves free. Under a pipeline each
stage is decided separately, by the integer program and by the greedy method, and nothing is offloaded. Rows of cases
that are not named stay in the file unchanged.

    python benchmarks/joint_memory.py [--write] [NAME ...]
"""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from machine import ask, write_rows

from legoai.cost.search.candidates import Choices
from legoai.cost.search.evaluation.evaluator import Figures, Simulation
from legoai.cost.search.joint.holes import MemoryHoles, Values
from legoai.cost.search.joint.observed import ObservedMemory
from legoai.cost.search.joint.stages import ObservedStageMemory
from legoai.cost.search.memory.program import Division, MemoryProblem, Rule
from legoai.cost.search.stages.action_graph import graph_of
from legoai.cost.search.stages.costs import Room, blocks_of_stages
from legoai.dsl.analysis.stages.pipeline import is_staged
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "joint_memory.json"
ROUNDS = 5
GIB = 2**30
TEXT = """\
plan case
{head}
checkpoint {{ layers.* = auto }}
optimizer adamw(lr = 3e-4)
"""
UNITS = "fsdp on dp_shard { layers.* = auto }"
OFFLOAD = "offload (optimizer = auto)"
ONE_HOST = "cluster h100_sxm\nmesh (dp_shard = 8)"
IN_BF16 = "attention flash\nprecision (param = bf16, reduce = fp32)"
CASES = {
    "Llama 3 1B, 1 x 4096": (
        f'model llama3("1b")\n{ONE_HOST}\nbatch (global = 64, micro = 1, seq_len = 4096)',
        (11, 12, 13, 14, 16, 18),
    ),
    "Llama 3 8B, 1 x 4096": (
        f'model llama3("8b")\n{ONE_HOST}\nbatch (global = 64, micro = 1, seq_len = 4096)',
        (28, 32, 36, 40, 44),
    ),
    "GPT-2 XL, 4 x 1024": (
        f'model gpt2("xl")\n{ONE_HOST}\nbatch (global = 32, micro = 4, seq_len = 1024)\n{IN_BF16}',
        (8, 10, 12, 14),
    ),
    "Mixtral 8x7B, 4 x 4096, 64 devices": (
        'model mixtral("8x7b")\ncluster h100_sxm(hosts = 8, fabric = infiniband_ndr)\nmesh (dp_shard = 64, ep = 8)\n'
        f"shard standard on ep\nbatch (global = 512, micro = 4, seq_len = 4096)\n{IN_BF16}",
        (32, 48, 64),
    ),
    "Llama 3 70B, 1 x 8192, 256 devices": (
        'model llama3("70b")\ncluster h100_sxm(hosts = 32, fabric = infiniband_ndr)\nmesh (dp_shard = 256)\n'
        f"batch (global = 512, micro = 1, seq_len = 8192)\n{IN_BF16}",
        (40, 56, 72),
    ),
}
"""Model, devices and batch, and the memory limits in GiB."""
PIPELINES = {
    "Llama 3 8B, 1 x 4096, pp = 4 on 8 devices": (
        'model llama3("8b")\ncluster h100_sxm\nmesh (pp = 4, dp_shard = 2)\npipeline on pp (schedule = 1F1B)\n'
        f"batch (global = 64, micro = 1, seq_len = 4096)\nloss chunked(8)\n{IN_BF16}\n{UNITS}",
        (42, 44, 48, 52),
    ),
    "Llama 3 70B, 1 x 8192, pp = 8 and tp = 8 on 256 devices": (
        'model llama3("70b")\ncluster h100_sxm(hosts = 32, fabric = infiniband_ndr)\n'
        "mesh (pp = 8, dp_shard = 4, tp = 8)\nshard standard on tp (sequence, loss_parallel)\n"
        "pipeline on pp (schedule = 1F1B)\nbatch (global = 128, micro = 1, seq_len = 8192)\n"
        f"fsdp on dp_shard {{ layers.* = unit(reshard = after_backward) }}\n{IN_BF16}",
        (28, 40),
    ),
}
"""The same for plans with a pipeline."""


@dataclass(slots=True)
class Simulated:
    """A plan whose candidates are simulated.

    Args:
        plan: the plan, with its holes.
        evaluator: evaluator of its candidates.
    """

    plan: OpenPlan
    evaluator: Simulation
    holes: MemoryHoles

    def figures(self, every: Sequence[Choices]) -> list[Figures]:
        """Simulated figures of candidates."""
        analyses = []
        for choices in every:
            candidate = self.plan.candidate(choices)
            assert candidate.analysis is not None and not candidate.errors, candidate.errors
            analyses.append(candidate.analysis)
        found = []
        for outcome in self.evaluator.evaluate(analyses, None):
            assert isinstance(outcome, Figures), outcome
            found.append(outcome)
        return found

    def chosen(self, values: Values) -> Choices:
        """The candidate with these values."""
        return self.holes.chosen((None,) * len(self.plan.holes), values)


def sequential(problem: MemoryProblem) -> Division | None:
    """The least recomputation that fits, then unsharded parameters in the memory that is left, then offloading."""
    resharded = {pair: costs for pair, costs in problem.pairs.items() if pair[1] == 0}
    for way, offloading in enumerate(problem.offloadings):
        one = replace(problem, pairs=resharded, offloadings=[offloading]).solve().division
        if one is None:
            continue
        units = sorted({pair[1] for pair in problem.pairs})
        rules: list[Rule] = [(unit, unit, 0) for unit in units]
        rules += [(*two, some) for two in itertools.combinations(units, 2) for some in range(1, problem.blocks)]
        found = [Division(one.checkpoint, rule, way) for rule in rules]
        return min((item for item in found if problem.excess(item) <= 0.0), key=problem.time)
    return None


Chooser = Callable[[Any], Any]
GREEDY: dict[str, Chooser] = {"greedy": lambda problem: problem.greedy()}
JOINT: dict[str, Chooser] = {"joint": lambda problem: problem.solve().division}


def best_of(
    choose: Chooser, simulated: Simulated, learnt: ObservedMemory | ObservedStageMemory, room: Room
) -> dict[str, Any] | None:
    """The best simulated step of a method; None where no choice of it is within the limit."""
    problem: Any = learnt.problem(room)
    corrected, seen = problem, set()
    best: dict[str, Any] | None = None
    least = math.inf
    for _ in range(ROUNDS):
        division = choose(corrected)
        if division is None or division in seen:
            break
        seen.add(division)
        written = learnt.written(division)
        values = learnt.values(written)
        [figures] = simulated.figures([simulated.chosen(values)])
        corrected = learnt.corrected(problem, written, figures)
        if figures.reserved <= room.reserved and figures.step_time < least:
            least = figures.step_time
            names = ("checkpoint", "fsdp", "offload")
            texts = zip(names, simulated.holes.holes, values, strict=True)
            best = {
                "step_time_s": figures.step_time,
                "predicted_step_time_s": learnt.predicted(problem, division),
                "reserved_gib": figures.reserved / GIB,
                "left_over": 1.0 - figures.reserved / room.reserved,
                **{
                    name: simulated.plan.holes[hole].choices[value]
                    for name, hole, value in texts
                    if hole is not None and value is not None
                },
            }
    return best


def learnt_of(simulated: Simulated, own: Values, known: dict[Values, Figures]) -> ObservedMemory | ObservedStageMemory:
    """Simulated figures of listed values."""
    analysis = simulated.plan.candidate(simulated.chosen(own)).analysis
    assert analysis is not None
    if not is_staged(analysis):
        return ObservedMemory(simulated.holes, own, known)
    graph = graph_of(analysis)
    assert graph is not None
    return ObservedStageMemory(simulated.holes, own, known, graph, blocks_of_stages(analysis))


def measured(
    name: str, simulated: Simulated, limits: Sequence[int], choosers: dict[str, Chooser]
) -> list[dict[str, Any]]:
    """Choices of the methods for a case under each of its limits."""
    treatments, units, ways = (simulated.holes.listed(kind) or [None] for kind in (0, 1, 2))
    every = [Values(one, other, ways[0]) for one in treatments for other in units]
    every += [Values(treatments[0], units[0], way) for way in ways[1:]]
    every = [one for one in every if not simulated.plan.candidate(simulated.chosen(one)).errors]
    known = dict(zip(every, simulated.figures([simulated.chosen(one) for one in every]), strict=True))
    learnt = learnt_of(simulated, every[0], known)
    rows = []
    for limit in limits:
        room = Room(device=math.inf, active=math.inf, reserved=limit * GIB)
        fitting = [figures.step_time for figures in known.values() if figures.reserved <= room.reserved]
        rows.append(
            {
                "case": name,
                "limit_gib": limit,
                "uniform_s": min(fitting, default=None),
                **{chooser: best_of(choose, simulated, learnt, room) for chooser, choose in choosers.items()},
            }
        )
        print(line(rows[-1]), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    ways = [row[name] for name in ("sequential", "greedy", "joint") if name in row]
    took = [row["uniform_s"], *(None if one is None else one["step_time_s"] for one in ways)]
    shown = "  ".join("   none" if one is None else f"{1e3 * one:7.1f}" for one in took)
    joint = row["joint"]
    how = "" if joint is None else "; ".join(joint[name] for name in ("fsdp", "checkpoint", "offload") if name in joint)
    filled = "" if joint is None else f"{joint['reserved_gib']:.2f} GiB, {joint['left_over']:.1%} left"
    return f"{row['limit_gib']:3} GiB  {shown} ms  {filled}  {how}"


def main() -> None:
    """Measure and print."""
    asked = ask(__doc__, RESULTS)
    rows = []
    alone = {"sequential": sequential, **GREEDY, **JOINT}
    cases = [(name, f"{head}\n{UNITS}\n{OFFLOAD}", limits, alone) for name, (head, limits) in CASES.items()]
    cases += [(name, head, limits, {**GREEDY, **JOINT}) for name, (head, limits) in PIPELINES.items()]
    for name, head, limits, choosers in cases:
        if not asked.has(name):
            continue
        print(f"{name}: limit, step of the best uniform plan, {', '.join(choosers)}", flush=True)
        with tempfile.TemporaryDirectory() as folder, Simulation(directory=Path(folder), whole=True) as evaluator:
            plan = OpenPlan(lint(TEXT.format(head=head), "case.plan", directory=Path(folder)), directory=Path(folder))
            rows += measured(name, Simulated(plan, evaluator, MemoryHoles(plan)), limits, choosers)
        if asked.options.write:
            held = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else []
            measured_now = {row["case"] for row in rows}
            write_rows(RESULTS, asked.about, [*(row for row in held if row["case"] not in measured_now), *rows])


if __name__ == "__main__":
    main()
