"""Seconds for which training waits for a checkpoint: synchronous against asynchronous saving.

A small Llama is trained in two processes over gloo, once with `save (asynchronous = false)` and once with
`asynchronous = true`. The output has medians over the run's checkpoints: the time for which the steps wait for one,
from the run's metrics, and the time until it is complete. Each is read back before older ones are removed.

    python benchmarks/checkpoint_wait.py [--write]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import ask

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "checkpoint_wait.json"
PLAN = """\
plan saved
model llama3("tiny", n_layers = 8, dim = 768, n_heads = 12, n_kv_heads = 12, hidden_dim = 2048, vocab_size = 8192)
cluster cpu(devices = 2)
batch (global = 4, micro = 2, seq_len = 64)
mesh (dp_shard = 2)
fsdp blocks on dp_shard
save (every = 3, keep = 2, asynchronous = {asynchronous})
steps 15
"""


def measured(asynchronous: bool) -> dict[str, Any]:
    """Train, and read the checkpoints' times from the run's metrics."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "saved.plan"
        plan.write_text(PLAN.format(asynchronous=str(asynchronous).lower()), encoding="utf-8")
        command = [sys.executable, "-m", "legoai", "run", plan.name]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        run = Path(folder) / "runs" / "saved"
        events = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        found = [event for event in events if event["event"] == "checkpoint"]
        size = sum(file.stat().st_size for file in (run / "checkpoints" / "step-15").iterdir())
    return {
        "asynchronous": asynchronous,
        "checkpoints": len(found),
        "bytes": size,
        "waited_s": statistics.median(event.get("waited", event["seconds"]) for event in found),
        "written_s": statistics.median(event["seconds"] for event in found),
    }


def main() -> int:
    """Measure and print both ways of saving."""
    asked = ask(__doc__, RESULTS)
    rows = [measured(asynchronous) for asynchronous in (False, True)]
    for row in rows:
        how = "asynchronous" if row["asynchronous"] else "synchronous "
        print(
            f"{how}: {row['checkpoints']} checkpoints of {row['bytes'] / 1e9:.2f} GB, a step waits "
            f"{row['waited_s']:.2f} s, written after {row['written_s']:.2f} s"
        )
    asked.save(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
