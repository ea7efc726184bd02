"""Buffers that forward updates: running statistics of batch normalisation, and those changed by the model's code."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from legoai.specs.models.manifests.described.updated_buffers import UpdatedBuffers

STATISTICS = ["running_mean", "running_var"]


class Norm(nn.Module):
    """Batch normalisation by a function, of statistics of its own."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.statistics = training
        self.register_buffer("running_mean", torch.zeros(3))
        self.register_buffer("running_var", torch.ones(3))

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, training=self.statistics)


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: nn.BatchNorm2d(3), [*STATISTICS, "num_batches_tracked"]),
        (lambda: nn.BatchNorm2d(3).eval(), []),
        (lambda: nn.BatchNorm2d(3, track_running_stats=False), []),
        (lambda: nn.InstanceNorm2d(3, track_running_stats=True), STATISTICS),
        (lambda: Norm(training=True), STATISTICS),
        (lambda: Norm(training=False), []),
    ],
)
def test_running_statistics_are_updated_in_training(build, expected: list[str], device: str):
    model = build().to(device)
    with torch.no_grad(), UpdatedBuffers(model) as updated:
        model(torch.zeros(2, 3, 4, 4, device=device))
    assert updated.names == expected
