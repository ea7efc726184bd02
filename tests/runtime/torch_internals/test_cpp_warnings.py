"""Warnings of torch's C++ side are held back while a plan is simulated, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SIMULATED = """
import os, sys
if sys.argv[1] == "imported":
    import torch
import legoai
from legoai.runtime.torch_internals import cpp_warnings

before = dict(os.environ)
assert legoai.solve("open.plan").best is not None
print(cpp_warnings._level().value, dict(os.environ) == before)
"""

PLAN = """plan open
model   llama3("tiny", n_layers = 1)
cluster cpu(devices = 2)
batch   (global = 4, micro = auto in [1, 2], seq_len = 16)
mesh    (dp_shard = 2)
fsdp blocks on dp_shard
"""

LEVELS = """
import os, sys
from legoai.runtime.torch_internals.cpp_warnings import _level, without_cpp_warnings

found = []
for _ in range(2):
    with without_cpp_warnings():
        import torch
        found.append((_level().value, os.environ.get("TORCH_CPP_LOG_LEVEL")))
    found.append((_level().value, os.environ.get("TORCH_CPP_LOG_LEVEL")))
print(found)
"""


def printed(code: str, *arguments: str, folder: Path, **environment: str) -> str:
    usual = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, env=usual | environment, capture_output=True, text=True,
        check=True, timeout=100,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="the name of c10's library is Linux's")
@pytest.mark.parametrize(
    ("given", "levels"),
    [
        ({}, [(2, "ERROR"), (1, None)]),
        pytest.param({"TORCH_CPP_LOG_LEVEL": "INFO"}, [(0, "INFO"), (0, "INFO")], marks=pytest.mark.slow),
    ],
)
def test_level_is_raised_while_entered_whether_or_not_torch_was_imported(given, levels, tmp_path):
    assert printed(LEVELS, folder=tmp_path, **given) == f"{levels * 2}\n"


@pytest.mark.slow
@pytest.mark.parametrize("torch", ["imported", "not imported"])
def test_solve_prints_no_warnings_of_simulated_groups(torch, tmp_path):
    (tmp_path / "open.plan").write_text(PLAN, encoding="utf-8")
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert printed(SIMULATED, torch, folder=tmp_path, **cache) == "1 True\n"
