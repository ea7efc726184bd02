"""Parameters without dims, without elements or of other dtypes are found where `fully_shard` would refuse them."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.rule_plans import codes, message

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


@pytest.fixture(autouse=True)
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "net.py").write_text(FACTORY)


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
