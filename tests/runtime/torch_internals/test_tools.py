"""What the patches of the benchmarks do: torch's own estimators run on fake tensors and without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import ROOT
from support.simulated import in_a_fork

PLAN = """\
plan one
model     llama3("tiny")
cluster   cpu(devices = 1)
batch     (global = 2, micro = 2, seq_len = 16)
precision (param = bf16)
optimizer adamw(lr = 1e-2)
"""


def asked(tool: str, path: Path) -> dict[str, float]:
    import sys

    sys.path.insert(0, str(ROOT))
    from benchmarks.torch_tools import _ask

    return _ask(tool, path, device="cpu")


@pytest.mark.parametrize("tool", ["MemTracker", "RuntimeEstimator"])
def test_the_tools_of_torch_run_without_a_gpu(tool: str, tmp_path: Path):
    path = tmp_path / "one.plan"
    path.write_text(PLAN)
    answer = in_a_fork(asked, tool, path)
    assert all(value > 0 for value in answer.values()) and len(answer) == 1
