"""Solved plans against an expert's configuration and the rule of thumb, and recomputation under a budget.

The plans of `plans/` with holes are solved, and three configurations of each are simulated by `legoai cost`: the
solution; the rule of thumb (least `tp · pp` that fits, then the largest micro batch, all else as solved); and the
worked plan of the same model and scale. That of Llama 3 70B on 256 GPUs is the configuration that TorchTitan's authors
published (32-way FSDP, 8-way tensor parallel, micro batches of 16, full checkpointing), without float8 and compilation,
which the solved plan does not use either. A solution that exceeds its memory limit, or is slower than another
configuration, fails.

Then models are checkpointed in every way: not at all, whole blocks, and `budget` with each of its methods of choosing
operators, at several shares of the activations' memory. The output has step time, recomputation and peak. An optimum
that recomputes more than greedy at the same budget fails, and so does a budget that recomputes more than whole blocks.

    python benchmarks/solved_plans.py [--write] [solved | budgets]
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import about_machine, legoai, write_rows

from legoai.api import solve

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SOLVED = {"llama3_70b_256_auto": "llama3_70b_256", "mixtral_8x7b_64_auto": "mixtral_8x7b_64"}
"""Plans with holes, and the worked plan of the same model and scale."""
TOLERANCE = 1.005
"""Factor by which an optimum may recompute more than greedy: budgets are rounded up to steps of 1/4096."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model for the comparison of budgets, on one host of 8 H100s."""

    name: str
    statement: str
    batch: str


MODELS = (
    Model("Llama 3.2 1B", 'llama3("1b")', "global = 16, micro = 2, seq_len = 4096"),
    Model("Llama 3.1 8B", 'llama3("8b")', "global = 8, micro = 1, seq_len = 8192"),
    Model("GPT-2 XL", 'gpt2("xl")', "global = 32, micro = 4, seq_len = 1024"),
)
BUDGETS = (0.25, 0.5)
BY = ("greedy", "knapsack", "ilp")


def configurations(name: str, worked: str) -> list[dict[str, Any]]:
    """The solution of a plan, the rule of thumb and the worked plan, each simulated."""
    solution = solve(ROOT / "plans" / f"{name}.plan")
    if solution.best is None:
        raise SystemExit(f"{name}.plan has no solution: {[item.message for item in solution.diagnostics]}")
    ways = {"solved": solution.best}
    ways |= {item.name: item.found for item in solution.baselines if item.found is not None}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for way, found in ways.items():
            file = Path(folder) / f"{name}.plan"
            file.write_text(solution.text(found.choices, record=False), encoding="utf-8")
            choices = {
                hole.what: hole.choices[index]
                for hole, index in zip(solution.plan.holes, found.choices, strict=True)
                if index is not None
            }
            rows.append(row_of(name, way, legoai("cost", str(file)), choices))
    return [*rows, row_of(name, f"{worked}.plan", legoai("cost", f"plans/{worked}.plan"), {})]


def row_of(plan: str, way: str, cost: dict[str, Any], choices: dict[str, str]) -> dict[str, Any]:
    """Row of one configuration in the results."""
    return {
        "plan": plan,
        "way": way,
        "choices": choices,
        "step_time_s": cost["step_time_s"],
        "mfu": cost["mfu"],
        "recompute_s": cost["recompute_s"],
        "exposed_communication_s": cost["exposed_communication_s"],
        "peak_active_gib": cost["memory"]["peak_active_bytes"] / 2**30,
        "peak_reserved_gib": cost["memory"]["peak_reserved_bytes"] / 2**30,
        "requirements": cost["requirements"],
    }


def budget_rows(model: Model) -> list[dict[str, Any]]:
    """Rows of a model, checkpointed in every way."""
    ways = {"none": "none", "full": "full"}
    ways |= {f"{share} by {by}": f"budget({share}, by = {by})" for share in BUDGETS for by in BY}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for way, treatment in ways.items():
            file = Path(folder) / "model.plan"
            file.write_text(
                f"plan model\n\nmodel {model.statement}\ncluster h100_sxm\nbatch ({model.batch})\nmesh (dp_shard = 8)\n"
                f"fsdp blocks on dp_shard\ncheckpoint {{ layers.* = {treatment} }}\nattention flash\n"
                "precision (param = bf16, reduce = fp32)\noptimizer adamw(lr = 3e-4)\n",
                encoding="utf-8",
            )
            rows.append(row_of(model.name, way, legoai("cost", str(file)), {}))
            told(rows[-1])
    return rows


def told(row: dict[str, Any]) -> None:
    """Print a row."""
    print(
        f"{row['plan']:<22} {row['way']:<22} step {row['step_time_s']:8.3f} s, recomputed {row['recompute_s']:7.4f} s, "
        f"exposed {row['exposed_communication_s']:7.3f} s, peak {row['peak_active_gib']:6.2f} GiB active, "
        f"{row['peak_reserved_gib']:6.2f} reserved {row['choices'] or ''}",
        flush=True,
    )


def missed_solutions(rows: list[dict[str, Any]]) -> list[str]:
    """Failures of a solved plan: it exceeds a limit, or is slower than another configuration."""
    solved, *others = rows
    found = [f"{solved['plan']}: {item} is not met" for item in solved["requirements"] if not item["ok"]]
    for other in others:
        feasible = all(item["ok"] for item in other["requirements"])
        if feasible and other["step_time_s"] < solved["step_time_s"] * (1 - 1e-9):
            found.append(f"{solved['plan']}: {other['way']} takes {other['step_time_s']:.3f} s, less than the solution")
    return found


def missed_budgets(rows: list[dict[str, Any]]) -> list[str]:
    """Failures of a checkpointed model: a budget recomputes more than whole blocks, or than greedy."""
    by = {row["way"]: row for row in rows}
    found = []
    for share, way in itertools.product(BUDGETS, BY):
        row = by[f"{share} by {way}"]
        if row["recompute_s"] > by["full"]["recompute_s"]:
            found.append(f"{row['plan']}: {row['way']} recomputes more than whole blocks")
        if row["recompute_s"] > by[f"{share} by greedy"]["recompute_s"] * TOLERANCE:
            found.append(f"{row['plan']}: {row['way']} recomputes more than greedy")
    return found


def main() -> int:
    """Simulate and print; the exit status is 0 where the expected orders hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", nargs="?", choices=("solved", "budgets"), help="only these")
    parser.add_argument("--write", action="store_true", help="write results/solved_plans.json and results/budgets.json")
    options = parser.parse_args()
    about, missed = about_machine(), []
    print(", ".join(f"{name} {value}" for name, value in about.items()), "\n", sep="")
    if options.what != "budgets":
        solved = []
        for name, worked in SOLVED.items():
            rows = configurations(name, worked)
            for row in rows:
                told(row)
            solved += rows
            missed += missed_solutions(rows)
        if options.write:
            write_rows(RESULTS / "solved_plans.json", about, solved)
    if options.what != "solved":
        budgets = []
        for model in MODELS:
            rows = budget_rows(model)
            budgets += rows
            missed += missed_budgets(rows)
        if options.write:
            write_rows(RESULTS / "budgets.json", about, budgets)
    print("\n".join(["", *(f"MISSED: {item}" for item in missed)]))
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
