"""Linear layers that take all tokens in one call, and give both gradients back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from legoai.specs.models.manifests.described.describe import describe

WIDTH = 8


class Casting(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.bfloat16(), self.weight.bfloat16()).float()


class Model(nn.Module):
    """Adds what a layer gives for something of the tokens' features to these."""

    def __init__(
        self, layer: nn.Module, given: Callable[[nn.Module, torch.Tensor], torch.Tensor], *, frozen: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.layer, self.given = layer, given
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.output = nn.Linear(WIDTH, 16)
        self.layer.requires_grad_(not frozen)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.given(self.layer, x)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def autocast(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return layer(x)


def unused(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    layer(x)
    return x


def in_pieces(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([layer(piece) for piece in x.chunk(2, dim=1)], dim=1)


def of_positions(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None].expand(-1, WIDTH))


def of_table(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """As many rows as there are tokens in one of the sizes at which a model is looked at."""
    return layer(x.new_zeros(16, WIDTH, requires_grad=True)).sum() + x


def checkpointed(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)


def noted(model: nn.Module) -> set[str]:
    manifest = describe(model, "test", shapes=True)
    assert manifest.flow_error is None
    return {path for path, module in manifest.modules.items() if module.trains_all_tokens}


def made(
    given: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    layer: type[nn.Linear] = nn.Linear,
    *,
    frozen: bool = False,
) -> Model:
    with torch.device("meta"):
        return Model(layer(WIDTH, WIDTH), given, frozen=frozen)


OTHERS = {"layers.0.0", "layers.1.0", "output"}


@pytest.mark.parametrize("given", [lambda layer, x: layer(x), lambda layer, x: layer(layer(x)), checkpointed])
def test_layers_of_all_tokens_are_noted(given: Callable[[nn.Module, torch.Tensor], torch.Tensor]):
    assert noted(made(given)) == {"layer", *OTHERS}


@pytest.mark.parametrize(
    "given",
    [
        autocast,
        unused,
        in_pieces,
        of_positions,
        of_table,
        pytest.param(lambda layer, x: layer(x.detach()), id="detached"),
        pytest.param(lambda layer, x: layer(x).detach(), id="detached result"),
        pytest.param(lambda layer, x: layer(x[:, :1]), id="first token"),
        pytest.param(lambda layer, x: layer(x.mean(1, keepdim=True)), id="mean"),
    ],
)
def test_layers_of_other_inputs_are_not(given: Callable[[nn.Module, torch.Tensor], torch.Tensor]):
    assert noted(made(given)) == OTHERS


def test_layers_that_compute_otherwise_are_not():
    assert noted(made(lambda layer, x: layer(x), Casting)) == OTHERS
    assert noted(made(lambda layer, x: layer(x), frozen=True)) == OTHERS
    hooked = made(lambda layer, x: layer(x))
    hooked.layer.register_forward_hook(lambda *_: None)
    assert noted(hooked) == OTHERS
