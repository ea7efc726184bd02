"""Modules that several modules hold are one, wherever stages, units and buckets place them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from legoai.dsl.analysis.parallelism.replicate import gradient_buckets
from legoai.dsl.lint import lint
from legoai.specs.models.manifests.load import load_manifest
from legoai.specs.models.source import ModelSource
from support.texts.rule_plans import BASE, codes, message

FACTORY = """
from torch import nn


class Block(nn.Module):
    def __init__(self, mixer):
        super().__init__()
        self.norm, self.act, self.mixer = nn.LayerNorm(16), ACT, mixer

    def forward(self, x):
        return x + self.mixer(self.act(self.norm(x)))


class Net(nn.Module):
    def __init__(self, shared):
        super().__init__()
        mixer = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
        block = Block(mixer)
        self.embed, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
        self.h = nn.ModuleList(
            block if shared == "block" else Block(mixer if shared == "mixer" else nn.Linear(16, 16)) for _ in range(4)
        )

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.h:
            x = block(x)
        return self.head(x)


ACT = nn.GELU()
"""
MODEL = 'model python("net:Net", shared = "{}")\n'


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The factory's folder, with a cache of its manifests."""
    folder = tmp_path_factory.mktemp("net")
    (folder / "net.py").write_text(FACTORY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield folder


@pytest.mark.parametrize(
    ("shared", "groups"),
    [
        ("mixer", (("h.0.mixer", "h.1.mixer", "h.2.mixer", "h.3.mixer"),)),
        ("block", (("h.0", "h.1", "h.2", "h.3"),)),
        ("nothing", ()),
    ],
)
def test_manifest_has_the_places_of_shared_modules(net: Path, shared: str, groups: tuple[tuple[str, ...], ...]):
    source = ModelSource(kind="python", target="net:Net", arguments={"shared": shared})
    assert load_manifest(source, base_directory=net).shared_modules == groups


def test_shared_modules_must_share_a_stage(net: Path):
    plan = "mesh (pp = 2, dp_shard = 4)\npipeline on pp (schedule = GPipe)\nfsdp on dp_shard { root = unit }"
    assert "`h.3.mixer` are one module" in message(MODEL.format("mixer") + plan, "LP515", net)
    assert "LP515" not in codes(MODEL.format("nothing") + plan, net)
    # Two stages may part before the first block; of four, some begin between the blocks.
    split = plan.replace("GPipe", "GPipe, split = auto")
    assert "LP515" not in codes(MODEL.format("mixer") + split, net)
    assert "LP515" in codes(MODEL.format("mixer") + split.replace("pp = 2, dp_shard = 4", "pp = 4, dp_shard = 2"), net)


@pytest.mark.parametrize(
    ("units", "legal"),
    [
        ("h.* = unit", False),
        ("h.0 = unit", False),
        ("{embed, head} = unit", True),
        ("h.*.mixer = unit, h.* = unit", True),
        ("h.*.mixer.* = unit, h.* = unit", True),
        ("h.*.mixer.0 = unit, h.* = unit", False),
    ],
)
def test_shared_modules_must_share_a_unit(net: Path, units: str, legal: bool):
    plan = f"mesh (dp_shard = 8)\nfsdp on dp_shard {{ {units} }}"
    assert ("LP325" not in codes(MODEL.format("mixer") + plan, net)) is legal
    assert "LP325" not in codes(MODEL.format("nothing") + plan.replace("mixer.*", "mixer").replace("r.0", "r"), net)


def test_shared_block_may_be_a_unit(net: Path):
    plan = "mesh (dp_shard = 8)\nfsdp on dp_shard { h.* = unit }"
    assert "LP325" not in codes(MODEL.format("block") + plan, net)


def test_blocks_with_a_shared_module_are_in_no_bucket_of_their_own(net: Path):
    plan = "mesh (dp_replicate = 8)\nreplicate on dp_replicate (bucket = 1KiB)"
    found = {}
    for shared in ("mixer", "nothing"):
        text = f'plan test\nextends "base.plan"\n{MODEL.format(shared)}{plan}'
        linted = lint(text, "test.plan", directory=net, read=lambda path: BASE)
        found[shared] = {path for bucket in gradient_buckets(linted.analysis) for path in bucket.paths}
    assert found["nothing"] > found["mixer"] == {"embed", "head"}
