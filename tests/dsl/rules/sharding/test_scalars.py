"""Parameters without dims, without elements, of other dtypes or layouts are found where they cannot be sharded."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.texts.rule_plans import BASE, codes, diagnostics, message

FACTORY = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, dims, other=""):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
        self.scale = nn.Parameter(torch.ones([1] * dims))
        if other == "empty":
            self.other = nn.Parameter(torch.ones(0))
        elif other == "frozen":
            self.other = nn.Parameter(torch.ones(0), requires_grad=False)
        elif other == "complex":
            self.other = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        elif other == "whole":
            self.other = nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False)

    def forward(self, tokens):
        return self.head(self.embed(tokens)) * self.scale
"""

STRIDED = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, kind="transposed", frozen=False):
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(256, 16), nn.Linear(16, 32), nn.Linear(32, 256)
        weight = self.mid.weight.detach()
        if kind == "transposed":
            weight = torch.randn(16, 32).t()
        elif kind == "slice":
            weight = torch.randn(32, 64)[:, :16]
        elif kind == "expanded":
            weight = torch.randn(32, 1).expand(32, 16)
        self.mid.weight = nn.Parameter(weight, requires_grad=not frozen)

    def forward(self, tokens):
        return self.head(self.mid(self.embed(tokens)))


class Images(nn.Module):
    reads = {"kind": "images", "channels": 4, "height": 8, "width": 8, "classes": 10}

    def __init__(self):
        super().__init__()
        self.conv, self.pointwise, self.head = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 1), nn.Linear(8, 10)
        self.to(memory_format=torch.channels_last)

    def forward(self, images):
        return self.head(self.pointwise(self.conv(images)).mean((2, 3)))
"""


@pytest.fixture(autouse=True)
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "net.py").write_text(FACTORY)
    (tmp_path / "strided.py").write_text(STRIDED)


@pytest.mark.parametrize("use", ["fsdp on dp_shard { root = unit }", "replicate on dp_replicate"])
def test_scalar_parameter_is_refused_under_sharding(tmp_path: Path, use: str) -> None:
    rest = f"mesh ({use.split()[2]} = 8)\n{use}"
    found = message(f'model python("net:Net", dims = 0)\n{rest}', "LP519", tmp_path)
    assert "`scale` is a single number" in found
    assert "LP519" not in codes(f'model python("net:Net", dims = 1)\n{rest}', tmp_path)


def test_scalar_parameter_on_one_device_is_accepted(tmp_path: Path) -> None:
    assert "LP519" not in codes('model python("net:Net", dims = 0)', tmp_path)


@pytest.mark.parametrize("use", ["fsdp on dp_shard { root = unit }", "replicate on dp_replicate"])
@pytest.mark.parametrize(
    ("other", "code", "words"),
    [
        ("empty", "LP523", "`other` has no elements"),
        ("frozen", "LP523", None),
        ("complex", "LP524", "`other` is of complex64"),
        ("whole", "LP524", "`other` is of int8"),
        ("", "LP524", None),
    ],
)
def test_parameters_that_units_cannot_hold_are_refused(
    tmp_path: Path, use: str, other: str, code: str, words: str | None
) -> None:
    text = f'model python("net:Net", dims = 1, other = "{other}")\nmesh ({use.split()[2]} = 8)\n'
    if words is None:
        assert code not in codes(f"{text}{use}", tmp_path)
    else:
        assert message(f"{text}{use}", code, tmp_path).startswith(words)
        assert code not in codes(text, tmp_path)


REPLICATE = "mesh (dp_replicate = 8)\nreplicate on dp_replicate"
UNITS = ("mesh (dp_shard = 8)\nfsdp on dp_shard { head = unit }", REPLICATE, f"{REPLICATE} (optimizer = sharded)")
OF_IMAGES = BASE.replace(", seq_len = 256", "")
TENSOR = "mesh (tp = 2)\nshard on tp { mid = colwise }"


@pytest.mark.parametrize("rest", UNITS)
@pytest.mark.parametrize("kind", ["transposed", "slice", "expanded", "contiguous"])
def test_units_refuse_parameters_that_are_not_contiguous(tmp_path: Path, rest: str, kind: str) -> None:
    text = f'model python("strided:Net", kind = "{kind}", frozen = true)\n{rest}'
    if kind == "contiguous":
        assert "LP525" not in codes(text, tmp_path)
    else:
        assert message(text, "LP525", tmp_path).startswith("`mid.weight` is not contiguous in memory, and `")


@pytest.mark.parametrize("rest", ["", "mesh (pp = 2)\npipeline on pp (schedule = 1F1B)"])
def test_plain_parameters_may_lie_in_any_layout(tmp_path: Path, rest: str) -> None:
    assert "LP525" not in codes(f'model python("strided:Net")\n{rest}', tmp_path)
    assert "LP525" not in codes(f'model python("strided:Images")\n{rest}', tmp_path, OF_IMAGES)


def test_convolutions_may_read_images_with_channels_last(tmp_path: Path) -> None:
    found = diagnostics(f'model python("strided:Images")\n{REPLICATE}', tmp_path, OF_IMAGES)
    refused = next(item for item in found if item.code == "LP525")
    assert refused.message.startswith("`conv.weight` is not"), "a filter of one pixel is contiguous in either format"
    assert [text for text in refused.help if "memory_format = torch.channels_last)" in text] == list(refused.help)


@pytest.mark.parametrize(
    ("model", "rest", "refused"),
    [
        ("", TENSOR, True),
        ("", "mesh (tp = 2)\nshard on tp { mid.weight = shard(1) }", True),
        ("", f"{TENSOR}\noptimizer adam(fused = true)", True),
        ("", f"{TENSOR}\noptimizer adamw(fused = false)", False),
        ("", f"{TENSOR}\noptimizer sgd(lr = 0.1)", False),
        ("", f"{TENSOR}\noptimizer adamw {{ mid.weight = muon(lr = 0.1) }}", False),
        ("", f"{TENSOR}\noptimizer adamw {{ mid.weight = group(lr = 0.1) }}", True),
        ("", "mesh (tp = 2)\nshard on tp { head = colwise }", False),
        (", frozen = true", TENSOR, False),
        (', kind = "contiguous"', TENSOR, False),
    ],
)
def test_fused_kernels_update_no_parts_of_parameters_that_are_not_contiguous(
    tmp_path: Path, model: str, rest: str, refused: bool
) -> None:
    assert ("LP525" in codes(f'model python("strided:Net"{model})\n{rest}', tmp_path)) is refused
