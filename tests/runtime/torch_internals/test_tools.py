"""Effects of the patches of the benchmarks: torch's own estimators run on fake tensors and without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support import ROOT
from support.simulation.simulated import in_a_fork

# Not fused, as most runs were with whose published memory the tools are compared.
PLAN = """\
plan one
model     llama3("tiny")
cluster   cpu(devices = 1)
batch     (global = 2, micro = 2, seq_len = 16)
precision (param = bf16)
optimizer adamw(lr = 1e-2, fused = false)
"""


def asked(tool: str, path: Path) -> dict[str, float]:
    import sys

    sys.path.insert(0, str(ROOT))
    from benchmarks.torch_tools import _ask

    return _ask(tool, path, device="cpu")


def value(tool: str, path: Path, text: str = PLAN) -> float:
    path.write_text(text)
    [found] = in_a_fork(asked, tool, path).values()
    return found


@pytest.mark.slow
def test_torch_memory_tracker_runs_without_a_gpu(tmp_path: Path):
    assert value("MemTracker", tmp_path / "one.plan") > 0


@pytest.mark.slow
def test_fsdp_memory_tracker_runs_without_a_gpu(tmp_path: Path):
    sharded = PLAN.replace("cpu(devices = 1)", "cpu(devices = 2)").replace("global = 2", "global = 4")
    sharded += "mesh (dp_shard = 2)\nfsdp on dp_shard { layers.* = unit }\n"
    found = value("FSDPMemTracker", tmp_path / "one.plan", sharded)
    assert found > 0
    if torch.__version__ >= "2.13":  # before, tensors of global shape are counted whatever is patched
        assert found < value("MemTracker", tmp_path / "other.plan")


@pytest.mark.slow
def test_torch_runtime_estimator_runs_without_a_gpu(tmp_path: Path):
    assert value("RuntimeEstimator", tmp_path / "one.plan") > 0
