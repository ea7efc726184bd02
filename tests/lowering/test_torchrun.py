"""A lowered program is a file that torchrun starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.texts.plans import HEAD, SEQUENCE_PARALLEL, lowered

PLAN = f"""\
{HEAD.replace("devices = 4", "devices = 2")}
batch (global = 16, micro = 4, seq_len = 32)
mesh  (tp = 2)
{SEQUENCE_PARALLEL}
checkpoint {{ layers.* = full }}
optimizer adamw(lr = 3e-4, betas = [0.9, 0.95], weight_decay = 0.1)
clip      (norm = 1.0)
schedule  cosine(warmup = 20, steps = 300, floor = 0.1)
"""


@pytest.mark.slow
def test_torchrun_trains_a_lowered_program(tmp_path: Path):
    program = lowered(PLAN)
    (tmp_path / "tiny.py").write_text(program.text)
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 2000)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "tiny.py",
        "--steps", "2", "--data", "text.txt", "--device", "cpu", "--out", "run", "--log-every", "0",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    events = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(program.digest in str(event) for event in events)
    losses = [event["loss"] for event in events if "loss" in event]
    assert len(losses) == 2
    assert all(5.0 < loss < 6.0 for loss in losses), "bytes are 256, so an untrained model loses about ln 256 = 5.5"
