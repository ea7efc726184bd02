"""Recomputation, unsharded parameters and offloading decided jointly, greedily, and one after the other.

What blocks hold and take is learnt from plans that treat all of them alike, as `legoai solve` does. Under each of a
grid of limits of reserved memory three choices are made from it: by the integer program; by the greedy rival; and one
after the other: the least recomputation that fits, then parameters kept unsharded in what is left, and the optimizer's
state offloaded where nothing fits before. Each is simulated whole, corrected by what it took beyond what was expected,
and made anew, until it stays. Written is the best simulated step of each that is within the limit, and what share of
the limit it leaves over. Rows of cases that are not named stay as they were.

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
from legoai.cost.search.evaluator import Figures, Simulation
from legoai.cost.search.joint_memory import JointMemory, Learnt, Values
from legoai.cost.search.memory.program import Division, MemoryProblem, Rule
from legoai.cost.search.stages.costs import Room
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "joint_memory.json"
ROUNDS = 5
GIB = 2**30
TEXT = """\
plan case
{head}
fsdp on dp_shard {{ layers.* = auto }}
checkpoint {{ layers.* = auto }}
offload (optimizer = auto)
optimizer adamw(lr = 3e-4)
"""
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
"""Model, devices and batch; and the limits in GiB."""


@dataclass(slots=True)
class Simulated:
    """A plan whose candidates are simulated.

    Args:
        plan: with its holes.
        evaluator: of its candidates.
    """

    plan: OpenPlan
    evaluator: Simulation
    joint: JointMemory

    def figures(self, every: Sequence[Choices]) -> list[Figures]:
        """The figures of candidates."""
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
        """The candidate of some values."""
        return self.joint.chosen((None,) * len(self.plan.holes), values)


def sequential(problem: MemoryProblem) -> Division | None:
    """The least recomputation that fits, then what is kept unsharded in the room that is left; offloading at last."""
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


CHOOSERS: dict[str, Callable[[MemoryProblem], Division | None]] = {
    "sequential": sequential,
    "greedy": MemoryProblem.greedy,
    "joint": lambda problem: problem.solve().division,
}


def best_of(
    choose: Callable[[MemoryProblem], Division | None], simulated: Simulated, learnt: Learnt, room: Room
) -> dict[str, Any] | None:
    """The best simulated step of a way to choose; None where it finds nothing within the room."""
    problem = learnt.problem(room)
    corrected, seen = problem, set()
    best: dict[str, Any] | None = None
    least = math.inf
    for _ in range(ROUNDS):
        division = choose(corrected)
        if division is None or division in seen:
            break
        seen.add(division)
        values = learnt.values(learnt.written(division))
        [figures] = simulated.figures([simulated.chosen(values)])
        corrected = problem.corrected(division, figures.active, figures.reserved)
        if figures.reserved <= room.reserved and figures.step_time < least:
            least = figures.step_time
            names = ("checkpoint", "fsdp", "offload")
            texts = zip(names, simulated.joint.holes, values, strict=True)
            best = {
                "step_time_s": figures.step_time,
                "predicted_step_time_s": problem.seconds + problem.time(division),
                "reserved_gib": figures.reserved / GIB,
                "left_over": 1.0 - figures.reserved / room.reserved,
                **{
                    name: simulated.plan.holes[hole].choices[value]
                    for name, hole, value in texts
                    if hole is not None and value is not None
                },
            }
    return best


def measured(name: str, simulated: Simulated, limits: Sequence[int]) -> list[dict[str, Any]]:
    """The choices of a case under each of its limits."""
    joint = simulated.joint
    treatments, units, ways = (joint.listed(kind) for kind in (0, 1, 2))
    every = [Values(one, other, ways[0]) for one in treatments for other in units]
    every += [Values(treatments[0], units[0], way) for way in ways[1:]]
    known = dict(zip(every, simulated.figures([simulated.chosen(one) for one in every]), strict=True))
    learnt = Learnt(joint, every[0], known)
    rows = []
    for limit in limits:
        room = Room(device=math.inf, active=math.inf, reserved=limit * GIB)
        fitting = [figures.step_time for figures in known.values() if figures.reserved <= room.reserved]
        rows.append(
            {
                "case": name,
                "limit_gib": limit,
                "uniform_s": min(fitting, default=None),
                **{chooser: best_of(choose, simulated, learnt, room) for chooser, choose in CHOOSERS.items()},
            }
        )
        print(line(rows[-1]), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    took = [row["uniform_s"], *(None if row[name] is None else row[name]["step_time_s"] for name in CHOOSERS)]
    shown = "  ".join("   none" if one is None else f"{1e3 * one:7.1f}" for one in took)
    joint = row["joint"]
    how = "" if joint is None else f"{joint['fsdp']}; {joint['checkpoint']}; offload {joint['offload']}"
    filled = "" if joint is None else f"{joint['reserved_gib']:.2f} GiB, {joint['left_over']:.1%} left"
    return f"{row['limit_gib']:3} GiB  {shown} ms  {filled}  {how}"


def main() -> None:
    """Measure and print."""
    asked = ask(__doc__, RESULTS)
    rows = []
    for name, (head, limits) in CASES.items():
        if not asked.has(name):
            continue
        print(f"{name}: limit, step of the best uniform plan, sequential, greedy, joint", flush=True)
        with tempfile.TemporaryDirectory() as folder, Simulation(directory=Path(folder), whole=True) as evaluator:
            plan = OpenPlan(lint(TEXT.format(head=head), "case.plan", directory=Path(folder)), directory=Path(folder))
            rows += measured(name, Simulated(plan, evaluator, JointMemory(plan)), limits)
        if asked.options.write:
            held = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else []
            measured_now = {row["case"] for row in rows}
            write_rows(RESULTS, asked.about, [*(row for row in held if row["case"] not in measured_now), *rows])


if __name__ == "__main__":
    main()
