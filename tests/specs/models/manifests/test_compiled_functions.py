"""Functions that a model's author compiles, in the inspection of the model."""

from __future__ import annotations

import torch
from torch import nn

from legoai.specs.models.manifests.described.describe import describe
from legoai.specs.models.torch_internals import meta_device

COMPILED = []


def noted(graph, _):
    COMPILED.append(graph)
    return graph.forward


@torch.compile(backend=noted)
def gated(x):
    return nn.functional.gelu(x) * x.sigmoid()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)

    def forward(self, tokens):
        return self.head(gated(self.embed(tokens)))


def test_nothing_is_compiled():
    """Dynamo would trace the inspection's own modes for seconds."""
    with meta_device():
        net = Net()
    manifest = describe(net, "net", shapes=True)
    assert manifest.flow_error is None
    assert manifest.modules[""].attributes["calls_compiled"] is True
    assert COMPILED == []
