"""Changes that make another training of a model that draws random numbers, or computes within its micro batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.differences.changes import changes
from legoai.dsl.differences.comparison import Comparison, Side
from legoai.dsl.differences.numerics import numerics
from legoai.dsl.differences.summary import summary
from legoai.dsl.frontend.resolve import resolve
from legoai.dsl.lint import lint

FACTORY = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dropped, inside):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.inner, self.outer = nn.Dropout(dropped if inside else 0.0), nn.Dropout(0.0 if inside else dropped)

    def forward(self, x):
        return x + self.outer(self.down(self.inner(self.up(x))))


class Net(nn.Module):
    def __init__(self, dropped, inside, norm):
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.blocks = nn.ModuleList(Block(dropped, inside) for _ in range(4))
        self.norm = nn.BatchNorm1d(8, track_running_stats=norm == "tracked") if norm else nn.Identity()
        self.head = nn.Linear(8, 256)

    def forward(self, tokens, positions=None):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Pairs(nn.Module):
    reads = {"kind": "images_with_texts", "channels": 3, "height": 4, "width": 4, "vocabulary": 256, "end": 0}

    def __init__(self):
        super().__init__()
        self.images, self.texts = nn.Linear(48, 8), nn.Embedding(256, 8)

    def forward(self, images, tokens):
        return self.texts(tokens).mean(1) @ self.images(images.flatten(1)).t()


def net(dropped=0.0, inside=False, norm=""):
    return Net(dropped, inside, norm)
"""

PLAN = """\
plan net
model     python("net:net"{options})
cluster   cpu(devices = 8)
batch     (global = 64, micro = 4, seq_len = 64)
mesh      (dp_shard = 8)
fsdp on dp_shard {{ blocks.* = unit, root = unit }}
precision (param = fp32)
"""
MICRO = ("micro = 4", "micro = 2")
FEWER = (("devices = 8", "devices = 4"), ("dp_shard = 8", "dp_shard = 4"))
REPLICAS = (("dp_shard = 8", "dp_replicate = 2, dp_shard = 4"), ("on dp_shard", "on dp_replicate, dp_shard"))
PIECES = (("plan net\n", "plan net\nshard on tp { blocks.*.up = colwise, blocks.*.down = rowwise }\n"),)
COMPILED = (("plan net\n", "plan net\ncompile { blocks.* = inductor }\n"),)
TRACED = (("plan net\n", "plan net\ncompile { blocks.* = aot_eager }\n"),)
HEAD = (("plan net\n", "plan net\ncompile { head = inductor }\n"),)
STAGES = (("dp_shard = 8", "dp_shard = 4, pp = 2"), ("plan net\n", "plan net\npipeline on pp (schedule = GPipe)\n"))
OPEN = (("micro = 4", "micro = auto in [2, 4]"),)
GPU = (("cpu(devices = 8)", "h100_sxm"),)
RECOMPUTED = (("plan net\n", "plan net\ncheckpoint { norm = full }\n"),)
REDRAWN = (("plan net\n", "plan net\ncheckpoint (preserve_rng = false) { blocks.* = full }\n"),)
KEPT = (("plan net\n", "plan net\ncheckpoint (preserve_rng = true) { blocks.* = full }\n"),)
DROPS, PLAIN, NORM, UNTRACKED = ", dropped = 0.1", "", ', norm = "tracked"', ', norm = "of each"'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("net")
    (made / "net.py").write_text(FACTORY)
    return made


def side(text: str, folder: Path) -> Side:
    linted = lint(text, "net.plan", directory=folder)
    assert not linted.has_errors, [item.message for item in linted.diagnostics]
    return Side(
        linted=linted,
        directory=folder,
        resolved=lambda variant: resolve(text, "net.plan", directory=folder, variant=variant),
    )


def effect(before: str, after: str, folder: Path) -> str:
    return summary(Comparison(side(before, folder), side(after, folder))).numerics


def edited(options: str, edits=()) -> str:
    text = PLAN.format(options=options)
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return text


CASES = [
    (DROPS, (MICRO,), "training"),
    (PLAIN, (MICRO,), "rounding"),
    (NORM, (MICRO,), "training"),
    (UNTRACKED, (MICRO,), "training"),
    (DROPS, OPEN, "training"),
    (PLAIN, OPEN, "rounding"),
    (DROPS, FEWER, "training"),
    (PLAIN, FEWER, "rounding"),
    (NORM, FEWER, "training"),
    (UNTRACKED, FEWER, "rounding"),
    (DROPS, REPLICAS, "rounding"),
    (NORM, REPLICAS, "rounding"),
    (DROPS, COMPILED, "training"),
    (DROPS, TRACED, "rounding"),
    (DROPS, HEAD, "rounding"),
    (DROPS, STAGES, "training"),
    (PLAIN, STAGES, "rounding"),
    (NORM, RECOMPUTED, "training"),
    (UNTRACKED, RECOMPUTED, "none"),
    (PLAIN, GPU, "training"),
    (DROPS, REDRAWN, "training"),
    (DROPS, KEPT, "none"),
    (PLAIN, REDRAWN, "none"),
]


@pytest.mark.parametrize(("options", "edits", "expected"), CASES)
def test_effect_depends_on_the_model(folder: Path, options: str, edits, expected: str):
    before, after = edited(options), edited(options, edits)
    assert effect(before, after, folder) == expected
    assert effect(after, before, folder) == expected


@pytest.mark.parametrize(("inside", "expected"), [("true", "training"), ("false", "rounding")])
def test_tensor_parallelism_changes_what_is_dropped_of_pieces(folder: Path, inside: str, expected: str):
    options = f", dropped = 0.1, inside = {inside}"
    narrow = [("devices = 8", "devices = 4"), ("dp_shard = 8", "dp_shard = 4")]
    wide = [("= 8)\nfsdp", "= 4, tp = 2)\nfsdp"), *PIECES]
    assert effect(edited(options, narrow), edited(options, wide), folder) == expected


@pytest.mark.parametrize(("before", "after", "expected"), [
    ("schedule = GPipe", "schedule = 1F1B", "rounding"),
    ("schedule = Interleaved1F1B, stages = 4", "schedule = LoopedBFS, stages = 4", "training"),
])  # fmt: skip
def test_order_of_stages_changes_what_is_dropped(folder: Path, before: str, after: str, expected: str):
    texts = [edited(DROPS, STAGES).replace("schedule = GPipe", schedule) for schedule in (before, after)]
    assert effect(*texts, folder) == expected


@pytest.mark.parametrize(("edits", "expected"), [((MICRO,), "training"), (FEWER, "rounding")])
def test_images_and_texts_are_matched_within_a_micro_batch(folder: Path, edits, expected: str):
    before, after = (edited("", changed).replace("net:net", "net:Pairs") for changed in ((), edits))
    before, after = (text.replace("blocks.* = unit, ", "") for text in (before, after))
    assert effect(before, after, folder) == expected


def test_a_model_that_cannot_be_inspected_is_compared(folder: Path):
    texts = [edited("").replace("net:net", "absent:net").replace("micro = 4", micro) for micro in MICRO]
    sides = []
    for text in texts:
        linted = lint(text, "net.plan", directory=folder)
        assert linted.analysis is not None
        sides.append(linted.analysis)
    assert sides[0].manifest is None
    [reason] = numerics(changes(sides[0].plan, sides[1].plan), *sides)
    assert reason.kind == "rounding"
