"""Models whose shapes depend on values are reported: no command can simulate them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.texts.rule_plans import codes, diagnostics

CONFIG = Path(__file__).parents[3] / "support" / "huggingface" / "qwen3_moe.json"
FACTORY = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.embed, self.head, self.how = nn.Embedding(256, 16), nn.Linear(16, 256), how

    def forward(self, tokens):
        x = self.embed(tokens)
        if self.how == "mask":
            x = x.masked_scatter(x > 1, x[x > 1].sqrt())
        if self.how == "places":
            x = x.index_fill(1, torch.nonzero(x[0, :, 0] > 1)[:, 0], 0.0)
        places = tokens.flatten()
        if self.how == "bincount":
            x = x * torch.bincount(places, minlength=256).float().mean()
        if self.how == "unique":
            x = x * torch.unique(places).numel()
        if self.how == "masked_select":
            x = x + torch.masked_select(x, x > 0).mean()
        if self.how == "repeat_interleave":
            x = x + places.repeat_interleave(places).float().mean()
        return self.head(torch.where(x > 1, x, 1.0))


def net(how):
    return Net(how)
"""


@pytest.mark.parametrize(
    ("how", "function"),
    [
        ("mask", "nonzero"),
        ("places", "nonzero"),
        *((name, name) for name in ("bincount", "unique", "masked_select", "repeat_interleave")),
        ("where", None),
    ],
)
def test_model_with_shapes_that_depend_on_values_is_a_warning(how: str, function: str | None, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FACTORY)
    text = f'model python("net:net", how = "{how}")\nmesh (dp_shard = 8)\nfsdp on dp_shard {{ root = unit }}\n'
    found = {item.code: item for item in diagnostics(text, tmp_path)}
    assert {"LP717", "LP336"} & found.keys() == ({"LP717", "LP336"} if function else set())
    if function is not None:
        assert found["LP717"].severity == "warning"
        assert f"(`torch.{function}`)" in found["LP717"].message
        assert found["LP717"].help[0].startswith(f"let forward read no values of tensors, as `torch.{function}` does")


def test_eager_experts_are_reported_at_their_argument(tmp_path: Path) -> None:
    plan = f'model huggingface("{CONFIG}", experts_implementation = "eager")\nrequire step_time <= 1s'
    [found] = [item for item in diagnostics(plan, tmp_path) if item.code == "LP717"]
    assert (found.severity, found.label.text) == ("warning", "not simulated")
    assert found.label.span.column > plan.index("experts_implementation =")
    assert found.help == (
        'leave `experts_implementation = "eager"` out: eager experts read how many tokens each of them takes',
    )
    assert [label.text for label in found.others] == ["is not tested"]
    assert "LP717" not in codes(f'model huggingface("{CONFIG}")', tmp_path)


def test_eager_experts_that_a_file_chooses_are_reported_too(tmp_path: Path) -> None:
    config = json.loads(CONFIG.read_text()) | {"experts_implementation": "eager"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    [found] = [item for item in diagnostics('model huggingface("config.json")', tmp_path) if item.code == "LP717"]
    assert found.help[0].startswith('give the model `experts_implementation = "grouped_mm"`')
