"""A plan that differs from the last one in batch, depth or learning rate is costed without running its program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.commands.forked_commands import forked

COST = """\
import sys
from legoai.cli import main
code = main(sys.argv[1:])
print("torch" in sys.modules, file=sys.stderr)
sys.exit(code)
"""


PLAN = """\
plan nine
model     llama3("tiny", n_layers = 9, dim = 32, n_heads = 4, n_kv_heads = 4, hidden_dim = 64, vocab_size = 128)
cluster   h100_sxm(hosts = 1)
batch     (global = 32, micro = 1, seq_len = 32)
mesh      (dp_shard = 8)
fsdp      on dp_shard { layers.* = unit, root = unit }
optimizer adamw(lr = 1e-3)
schedule  cosine(warmup = 10, steps = 1000)
clip      (norm = 1.0)
"""


def cost(home: Path, plan: str, cache: str) -> tuple[dict[str, object], bool]:
    """Return the estimate of a plan, and whether torch was imported for it."""
    done = subprocess.run(
        [sys.executable, "-c", COST, "cost", plan, "--json"],
        cwd=home, env=os.environ | {"XDG_CACHE_HOME": str(home / cache)}, capture_output=True, text=True, check=True,
        timeout=240,
    )  # fmt: skip
    return json.loads(done.stdout), done.stderr.rstrip().endswith("True")


def simulated(monkeypatch: pytest.MonkeyPatch, plan: str, cache: Path) -> dict[str, Any]:
    """Return the estimate of a plan, by a process that has torch."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    done = forked("cost", plan, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_estimate_from_a_cached_capture_is_equal_and_needs_no_torch(tmp_path, monkeypatch):
    (tmp_path / "nine.plan").write_text(PLAN)
    other = PLAN.replace("= 9", "= 12").replace("global = 32", "global = 96")
    other = other.replace("1e-3", "3e-4").replace("warmup = 10", "warmup = 25").replace("norm = 1.0", "norm = 0.5")
    (tmp_path / "other.plan").write_text(other)
    monkeypatch.chdir(tmp_path)
    simulated(monkeypatch, "nine.plan", tmp_path / "cache")
    composed, ran = cost(tmp_path, "other.plan", "cache")
    assert not ran
    assert simulated(monkeypatch, "other.plan", tmp_path / "empty") == composed
