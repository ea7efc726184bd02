"""A factory's model whose result does not fit its loss is reported on the `model` statement."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.lint import lint

FACTORY = """
from torch import nn


class Net(nn.Module):
    def __init__(self, beside):
        super().__init__()
        self.embed, self.head, self.beside = nn.Embedding(256, 16), nn.Linear(16, 256), beside

    def forward(self, tokens, targets=None):
        logits = self.head(self.embed(tokens))
        return (logits, None) if self.beside else logits
"""


@pytest.mark.parametrize("beside", ["true", "false"])
def test_result_beside_others_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: str):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "net.py").write_text(FACTORY)
    plan = f'plan net\nmodel python("net:Net", beside = {beside})\ncluster cpu\n'
    plan += "batch (global = 8, micro = 8, seq_len = 8)\n"
    found = [
        (item.code, item.message, item.label.span.line)
        for item in lint(plan, "net.plan", directory=tmp_path).diagnostics
    ]
    message = "forward returns a tuple of Tensor, None, and the loss takes one tensor"
    assert found == ([("LP230", message, 2)] if beside == "true" else [])


VALUES = """
        counts = torch.bincount(tokens.flatten(), minlength=256)
        return (logits, counts.float().mean()) if self.beside else logits * counts.tolist()[0]
"""


@pytest.mark.parametrize("beside", ["true", "false"])
def test_forward_that_needs_values_is_called_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: str):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    head, _, _ = FACTORY.partition("        return ")
    (tmp_path / "net.py").write_text(f"import torch{head}{VALUES}")
    plan = f'plan net\nmodel python("net:Net", beside = {beside})\ncluster cpu\n'
    plan += "batch (global = 8, micro = 8, seq_len = 8)\n"
    found = [item.message for item in lint(plan, "net.plan", directory=tmp_path).diagnostics if item.code == "LP230"]
    message = "forward returns a tuple of Tensor, Tensor, and the loss takes one tensor"
    assert found == ([message] if beside == "true" else [])
