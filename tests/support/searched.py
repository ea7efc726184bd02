"""A small plan with holes for tests of the search, and its opening."""

from __future__ import annotations

from pathlib import Path

from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan

TEXT = """\
plan test
model   llama3("tiny")
cluster cpu(devices = 4)
batch   (global = 32, micro = auto in [2, 8, 16], seq_len = 128)
mesh    (dp_shard = rest, tp = auto)
shard standard on tp (sequence = auto)
fsdp blocks on dp_shard
checkpoint { layers.* = auto in [none, full, every(2)] }
precision (param = fp32, reduce = fp32)
"""

SCHEDULED = """\
plan test
model   llama3("tiny")
cluster cpu(devices = 4)
batch   (global = 32, micro = auto in [1, 2, 4], seq_len = 128)
mesh    (pp = auto, dp_shard = rest)
pipeline on pp (schedule = auto in [GPipe, 1F1B])
fsdp blocks on dp_shard
checkpoint { layers.* = auto in [none, full] }
precision (param = fp32, reduce = fp32)
"""


def opened(text: str = TEXT) -> OpenPlan:
    linted = lint(text, "test.plan", directory=Path())
    assert not linted.has_errors, linted.diagnostics
    return OpenPlan(linted, directory=Path())
