"""Step time and exposed communication under buckets by module, group and bytes, and under solved buckets.

Llama 3 8B on the graph backend, fully sharded over the H100s of one host and of eight. `legoai solve` fills
`comm { layers.* = auto }`; Algorithm 1 is SimpleFSDP's, `least` the exact dynamic programme. Every step is simulated.

    python benchmarks/buckets.py [--write] [NAME ...]
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import ask, legoai

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "buckets.json"
BY_BYTES = "bucket(bytes(25MB))"

PLAN = """\
plan buckets

model   llama3("8b")
cluster h100_sxm(hosts = {hosts}, fabric = infiniband_ndr)
batch   (global = {devices}, micro = 1, seq_len = {tokens})
mesh    (dp_shard = {devices})

fsdp on dp_shard (backend = graph) {{ layers.* = unit }}
comm (reorder = true) {{ layers.* = {buckets} }}
checkpoint {{ layers.* = full }}
precision (param = bf16, reduce = fp32)
attention flash
loss eager
"""


@dataclass(frozen=True, slots=True)
class Case:
    """Number of hosts of 8 devices, and tokens of a sequence; a micro batch has one sequence."""

    hosts: int
    tokens: int

    @property
    def name(self) -> str:
        """Description of the case."""
        return f"8B on {8 * self.hosts}, {self.tokens} tokens"

    def text(self, buckets: str) -> str:
        """The plan with a treatment of the blocks' collectives."""
        text = PLAN.format(hosts=self.hosts, devices=8 * self.hosts, tokens=self.tokens, buckets=buckets)
        return text if self.hosts > 1 else text.replace("hosts = 1, fabric = infiniband_ndr", "hosts = 1")


CASES = (Case(1, 8192), Case(1, 2048), Case(8, 8192), Case(8, 2048))


def called(command: str, text: str, folder: str) -> dict[str, Any]:
    """The JSON output of a `legoai` command for a plan."""
    path = Path(folder) / "buckets.plan"
    path.write_text(text, encoding="utf-8")
    return legoai(command, str(path), *(["--all"] if command == "solve" else []), cache=folder)


def measured(case: Case) -> dict[str, Any]:
    """Solve a plan with open buckets, and predict its cost with buckets of 25 MB."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        solved = called("solve", case.text("auto"), folder)
        elapsed = time.perf_counter() - start
        by_bytes = called("cost", case.text(BY_BYTES), folder)
    [solution] = solved["buckets"]
    rows = [
        {
            "buckets": item["choices"][0]["value"],
            "step_time_s": item["step_time_s"],
            "exposed_s": sum(item["exposed_communication_by_axis_s"].values()),
            "peak_active_gib": item["peak_active_bytes"] / 2**30,
            "verdict": item["verdict"],
        }
        for item in solved["all"]
    ]
    rows.append({
        "buckets": BY_BYTES,
        "step_time_s": by_bytes["step_time_s"],
        "exposed_s": by_bytes["exposed_communication_s"],
        "peak_active_gib": by_bytes["memory"]["peak_active_bytes"] / 2**30,
        "verdict": "feasible" if by_bytes["memory"]["fits"] else "does not fit",
    })  # fmt: skip
    return {
        "case": case.name,
        "solve_s": elapsed,
        "algorithm_1": solution["algorithm_1"],
        "least": solution["least"],
        "tried": sorted(rows, key=lambda row: row["step_time_s"]),
    }


def main() -> None:
    """Measure and print."""
    asked = ask(__doc__, RESULTS)
    rows = []
    for case in CASES:
        if not asked.has(case.name):
            continue
        row = measured(case)
        print(f"{case.name}: {row['solve_s']:.0f} s")
        for item in row["tried"]:
            names = [name for name in ("algorithm_1", "least") if row[name] and row[name]["value"] == item["buckets"]]
            print(
                f"  {1e3 * item['step_time_s']:8.1f} ms  {1e3 * item['exposed_s']:6.1f} ms exposed  "
                f"{item['peak_active_gib']:5.1f} GiB  {item['buckets']}  {' '.join(names)}",
                flush=True,
            )
        rows.append(row)
    asked.save(rows)


if __name__ == "__main__":
    main()
