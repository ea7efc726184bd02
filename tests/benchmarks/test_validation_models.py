"""Models of published runs: their operators are those of the software that was measured."""

from __future__ import annotations

import torch
from benchmarks.validation import models

_SMALL = {"n_layers": 2, "dim": 16, "n_heads": 2, "vocab_size": 32, "max_seq_len": 8}


def test_composer_computes_metrics_behind_the_backward_of_a_micro_batch(monkeypatch):
    model = models.mpt("1.3b", **_SMALL)
    seen = []
    compute = models._metrics

    def noted(logits: torch.Tensor, tokens: torch.Tensor) -> None:
        seen.append([parameter.grad is not None for parameter in model.parameters()])
        compute(logits, tokens)

    monkeypatch.setattr(models, "_metrics", noted)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    for count in (1, 2):
        logits = model(tokens)
        assert len(seen) == count - 1
        logits.sum().backward()
        assert len(seen) == count and all(seen[-1])
    with torch.no_grad():
        model(tokens)
    assert len(seen) == 2
