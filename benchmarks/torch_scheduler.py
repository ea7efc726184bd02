"""Step time under LegoAI's graph passes, against torch's automatic scheduler of communication.

Llama 3 8B on the graph backend, fully sharded over the H100s of one host and of eight, as in `buckets.py`. Torch's
scheduler (`bucket(compiler)`) uses the simulator's times, and the simulator executes the resulting graph. LegoAI's
passes are: a bucket for each block, reordered; the same with the embedding and the output as units of their own; these
units with all-gathers and waits placed by the simulator's times; and, on 8 hosts with short sequences, where
`buckets.py` finds them better, the buckets that `legoai solve` writes. Every step is simulated.

    python benchmarks/torch_scheduler.py [--write] [NAME ...]
"""

from __future__ import annotations

import tempfile
from typing import Any, Final

from buckets import CASES, Case, called
from machine import ROOT, ask

RESULTS: Final = ROOT / "benchmarks" / "results" / "torch_scheduler.json"
TORCH: Final = "bucket(compiler)"
BY_TIME: Final = "bucket(module), embedding and output as units, by time"
ENDS: Final = "layers.* = unit, {tok_embeddings, output} = unit(reshard = after_backward)"


def plans(case: Case) -> dict[str, str]:
    """Texts of a case's plans, by their communication statements."""
    module = case.text("bucket(module)")
    ends = module.replace("{ layers.* = unit }", f"{{ {ENDS} }}")
    found = {
        TORCH: case.text(TORCH).replace("comm (reorder = true)", "comm"),
        "bucket(module), reordered": module,
        "the same, embedding and output as units": ends,
        BY_TIME: ends.replace("reorder = true", "reorder = by_time"),
    }
    if case.hosts > 1 and case.tokens < 8192:
        found["bucket([2, 5, 12, 10, 3]), reordered"] = case.text("bucket([2, 5, 12, 10, 3])")
    return found


def costed(text: str) -> dict[str, Any]:
    """Simulated step of a plan."""
    with tempfile.TemporaryDirectory() as folder:
        found = called("cost", text, folder)
    return {
        "step_time_s": found["step_time_s"],
        "exposed_s": found["exposed_communication_s"],
        "peak_active_gib": found["memory"]["peak_active_bytes"] / 2**30,
    }


def main() -> None:
    """Measure and print."""
    asked = ask(__doc__, RESULTS)
    rows = []
    for case in CASES:
        if not asked.has(case.name):
            continue
        print(case.name)
        of_case = []
        for name, text in plans(case).items():
            row = {"case": case.name, "communication": name, **costed(text)}
            of_case.append(row)
            share = 100 * (row["step_time_s"] / of_case[0]["step_time_s"] - 1)
            print(
                f"  {1e3 * row['step_time_s']:8.1f} ms  {share:+5.1f}%  {1e3 * row['exposed_s']:6.1f} ms exposed  "
                f"{row['peak_active_gib']:5.1f} GiB  {name}",
                flush=True,
            )
        rows += of_case
    asked.save(rows)


if __name__ == "__main__":
    main()
