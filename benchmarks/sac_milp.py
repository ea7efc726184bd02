"""Recomputation chosen by LegoAI under a memory limit, against the choice of torch's integer program.

`torch.distributed._tools.sac_ilp.sac_milp` (Auto-SAC) decides for every block which share of its operators' memory to
discard. Its inputs come from torch's tools as in torch's own test: `MemTracker`, `RuntimeEstimator` with the rates of
an H100, and `SACEstimator`, on fake tensors, for the program that the plan lowers to. The bytes that each block may
save are then written into the plan, `layers.3 = budget(…)`, and both solutions are simulated by the same simulator.
LegoAI's solution is that of `legoai solve` for `checkpoint { layers.* = auto }` under the same limit of active memory,
and, where torch's solution exceeds its limit, under the peak of that solution. Full checkpointing is reported too.
Limits are between the peak under full checkpointing and that without checkpointing. All plans are for one H100:
`sac_milp` does not model unsharded parameters.

Its model has no optimizer state, so the bytes of that state are subtracted from its limit.

    pip install pwlf
    python -m benchmarks.sac_milp [--write] [NAME ...]
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.machine import ROOT, ask, legoai
from benchmarks.torch_tools import fake_steps, rates_of_h100

RESULTS: Final = ROOT / "benchmarks" / "results" / "sac_milp.json"
GIB: Final = 2**30


@dataclass(frozen=True, slots=True)
class Case:
    """A model on one H100.

    Attributes:
        model: model statement.
        batch: options of the batch statement.
    """

    model: str
    batch: str


CASES: Final = {
    "Llama 3 1B": Case('llama3("1b")', "global = 2, micro = 2, seq_len = 4096"),
    "GPT-2 medium": Case('gpt2("medium")', "global = 16, micro = 16, seq_len = 1024"),
}
SHARES: Final = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Memory limits: shares of the memory saved by full checkpointing that a limit leaves."""


def text(case: Case, checkpoint: str, *more: str) -> str:
    """Text of a case's plan with a checkpoint statement."""
    lines = [
        "plan case",
        f"model {case.model}",
        "cluster h100_sxm(devices = 1)",
        f"batch ({case.batch})",
        *([f"checkpoint {{ {checkpoint} }}"] if checkpoint else []),
        "attention flash",
        "precision (param = bf16, reduce = fp32)",
        "optimizer adamw(lr = 3e-4)",
        *more,
    ]
    return "\n".join(lines) + "\n"


def told_by_torch(plan: Path, limits: Sequence[float]) -> list[dict[str, Any]]:
    """Solutions of `sac_milp` for a plan without checkpointing under limits of active memory in GiB.

    Returns:
        For each limit with a solution: the bytes that each block saves, by the block's index, without blocks that
        discard nothing; and its predicted seconds of recomputation and peak.
    """
    import torch

    import legoai
    from legoai.runtime.torch_internals.estimators import (
        MemTracker,
        RuntimeEstimator,
        SACEstimator,
        aggregate_stats,
        parse_module_info,
    )
    from legoai.runtime.torch_internals.sac_milp import sac_milp

    mode = "operator-level-cost-model"
    with fake_steps(legoai.lower(plan).text, world=1) as (training, take):
        tracker = MemTracker()
        tracker.track_external(training.model, training.optimizer)
        with tracker:
            take(0)
            tracker.reset_mod_stats()
            take(1)
        with rates_of_h100(), RuntimeEstimator()(mode) as runtimes:
            take(2)
        with rates_of_h100(), SACEstimator()(mode) as checkpoints:
            take(3)
        state = sum(
            item.untyped_storage().nbytes()
            for values in training.optimizer.state.values()
            for item in values.values()
            if isinstance(item, torch.Tensor)
        )
        graph = parse_module_info(aggregate_stats(training.model, tracker, runtimes, checkpoints, torch.device("cpu")))
    blocks = {node["fqn"]: node for node in graph.nodes if node["fqn"].rpartition(".")[2].isdigit()}
    found = []
    for limit in limits:
        discarded, milliseconds, peak = sac_milp(graph, limit - state / GIB, ac_units=list(blocks))
        if peak < 0:
            found.append({})
            continue
        kept = {
            int(path.rpartition(".")[2]): round(blocks[path]["sac_memory"] * (1.0 - share))
            for path, share in discarded.items()
        }
        found.append({"kept": kept, "recompute_s": milliseconds / 1e3, "peak_gib": (peak + state) / GIB})
    return found


def rules(kept: dict[int, int]) -> str:
    """Rules of `checkpoint` by which each block keeps a number of bytes."""
    written = []
    for size, run in itertools.groupby(sorted(kept), key=kept.__getitem__):
        blocks = list(run)
        for _, near in itertools.groupby(enumerate(blocks), key=lambda pair: pair[1] - pair[0]):
            some = [block for _, block in near]
            written.append(f"layers.{{{some[0]}..{some[-1]}}} = {f'budget({size}B)' if size else 'full'}")
    return ", ".join(written)


def figures(plan: Path) -> dict[str, float]:
    """Simulated figures of a plan."""
    found = legoai("cost", str(plan))
    return {
        "step_time_s": found["step_time_s"],
        "recompute_s": found["recompute_s"],
        "peak_gib": found["memory"]["peak_active_bytes"] / GIB,
    }


def measured(name: str, case: Case) -> list[dict[str, Any]]:
    """Both solutions under each limit, with their simulated figures."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "case.plan"

        def simulated(content: str) -> dict[str, float]:
            plan.write_text(content, encoding="utf-8")
            return figures(plan)

        def solved(limit: float) -> dict[str, Any]:
            requirement = f"require peak_memory <= {int(limit * GIB)}B"
            plan.write_text(text(case, "layers.* = auto", requirement), encoding="utf-8")
            choices = [choice["value"] for choice in legoai("solve", str(plan), "--in-place")["choices"]]
            return {"choices": choices, **figures(plan)}

        full, none = simulated(text(case, "layers.* = full")), simulated(text(case, ""))
        limits = [full["peak_gib"] + share * (none["peak_gib"] - full["peak_gib"]) for share in SHARES]
        for limit, answer in zip(limits, told_by_torch(plan, limits), strict=True):
            row: dict[str, Any] = {"case": name, "limit_gib": limit, "none": none, "full": full}
            row |= {"torch": None, "legoai": solved(limit), "legoai at torch's peak": None}
            if answer:
                taken = simulated(text(case, rules(answer["kept"])))
                row["torch"] = {**taken, "expected": answer}
                if taken["peak_gib"] > limit:
                    row["legoai at torch's peak"] = solved(taken["peak_gib"])
            rows.append(row)
            print(line(row), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """A row as text."""

    def figures(way: str) -> str:
        found = row[way]
        if found is None:
            return f"{way}: none"
        return f"{way}: {1e3 * found['recompute_s']:.1f} ms recomputed, {found['peak_gib']:.2f} GiB"

    ways = ("full", "torch", "legoai", "legoai at torch's peak")
    return f"{row['limit_gib']:5.2f} GiB  " + ";  ".join(map(figures, ways))


def main() -> int:
    """Measure and print; the exit status is 0 where LegoAI recomputes no more in the same memory."""
    asked = ask(__doc__, RESULTS)
    rows = []
    for name, case in CASES.items():
        if asked.has(name):
            print(name, flush=True)
            rows += measured(name, case)
    asked.save(rows)
    worse = [
        row
        for row in rows
        if row["torch"]
        and (row["legoai at torch's peak"] or row["legoai"])["recompute_s"] > row["torch"]["recompute_s"] * (1 + 1e-9)
    ]
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
