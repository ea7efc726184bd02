"""A step's memory is independent of the cyclic garbage collector and of the process's imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

PLAN = """\
plan small
model llama3("tiny", n_layers = 2)
cluster h100_sxm
batch (global = 8, micro = 1, seq_len = 128)
mesh (dp_shard = 8)
fsdp blocks on dp_shard
compile { layers.* = inductor }
optimizer adamw(lr = 3e-4)
"""
PEAKS = f"""
from legoai.cost.capture import capture
from legoai.cost.memory.storages import memory
from legoai.dsl.lint import lint
from legoai.lowering.program import lower
from legoai.specs.cluster import device
from pathlib import Path

program = lower(lint({PLAN!r}, "small.plan", directory=Path()).analysis)
for _ in range(2):
    print(memory(capture(program, world=8, gpu=device("h100_sxm"), replay=False)).peak)
"""


@pytest.mark.slow
def test_first_compilation_has_the_peak_memory_of_later_ones() -> None:
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    first, second = map(int, done.stdout.split())
    assert first == second > 0
