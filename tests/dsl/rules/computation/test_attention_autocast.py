"""Attention kernels in a model whose own forward enters autocast: they take the dtype of that, not of the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.texts.rule_plans import codes, message

FACTORY = """
import torch
import torch.nn.functional as F
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.qkv = nn.Linear(4 * width, 12 * width)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, self.width).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

class Model(nn.Module):
    def __init__(self, device, width, every):
        super().__init__()
        self.device, self.every = device, every
        self.tok_embeddings = nn.Embedding(512, 4 * width)
        self.layers = nn.ModuleList([Block(width) for _ in range(2)])
        self.output = nn.Linear(4 * width, 512, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for index, layer in enumerate(self.layers):
            kind = self.device or tokens.device.type
            with torch.autocast(kind, dtype=torch.bfloat16, enabled=self.every or index > 0):
                x = layer(x)
        return self.output(x)

def build(device="", width=32, every=True):
    return Model(device, width, every)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("casting")
    (folder / "casting_attention.py").write_text(FACTORY, encoding="utf-8")
    return folder


def plan(kernel: str, arguments: str = "", param: str = "fp32") -> str:
    model = f'model python("casting_attention:build"{arguments})'
    return f"{model}\nattention {kernel}\nprecision (master = {param}, param = {param})"


@pytest.mark.parametrize("arguments", ["", ', device = "cuda"'])
def test_flash_takes_what_the_model_casts(folder: Path, arguments: str):
    assert "LP632" not in codes(plan("flash", arguments), folder)


@pytest.mark.parametrize(
    ("arguments", "param"), [(', device = "cpu"', "fp32"), (", every = false", "fp32"), ("", "fp64")]
)
def test_calls_that_stay_wide_are_refused(folder: Path, arguments: str, param: str):
    assert f"the plan computes in {param}" in message(plan("flash", arguments, param), "LP632", folder)


def test_heads_fit_the_dtype_that_the_model_casts_to(folder: Path):
    assert "a multiple of 8 in bf16" in message(plan("efficient", ", width = 20"), "LP633", folder)
    assert "LP633" not in codes(plan("efficient", ', width = 20, device = "cpu"'), folder)
