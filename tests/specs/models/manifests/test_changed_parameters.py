"""Parameters that forward changes, and the module whose own forward does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from legoai.specs.models.manifests.described.describe import describe
from legoai.specs.models.manifests.described.recorders.changed_parameters import ChangedParameters
from support.models.read_weights import build


class Changing(nn.Module):
    """Changes a parameter in a way of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.fast, self.slow, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.how == "item":
                self.slow.weight[0] = 1.0
            elif self.how == "foreach":
                torch._foreach_lerp_(list(self.slow.parameters()), list(self.fast.parameters()), 0.5)
            elif self.how == "part of data":
                self.slow.weight.data[0].mul_(0.5)
            elif self.how == "twice":
                self.slow.weight.data = self.slow.weight * 0.5
                self.slow.weight.mul_(2.0)
        return self.slow(self.fast(x)).relu_().add_(1.0)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("item", ["slow.weight"]),
        ("foreach", ["slow.weight", "slow.bias"]),
        ("part of data", ["slow.weight"]),
        ("twice", ["slow.weight"]),
        ("nothing", []),
    ],
)
def test_changes_are_seen_however_they_are_written(how: str, expected: list[str]):
    with torch.device("meta"), torch.no_grad():
        model = Changing(how)
        with ChangedParameters(model) as changed:
            model(torch.zeros(2, 4))
    assert changed.by_module == ({"": expected} if expected else {})


@pytest.mark.parametrize("how", ["in_place", "data"])
def test_equal_blocks_share_their_names(how: str):
    modules = describe(build(how).to("meta"), "model", shapes=True).modules
    assert modules["blocks.0"].changed_parameters == modules["blocks.1"].changed_parameters == ("slow.weight",)
    assert not modules[""].changed_parameters and not modules["blocks.0.slow"].changed_parameters


def test_assignment_of_the_same_values_is_no_change():
    assert not describe(build("same").to("meta"), "model", shapes=True).modules["blocks.0"].changed_parameters


def test_options_of_embeddings_are_noted_where_they_are_chosen():
    plain = describe(build("none").to("meta"), "model").modules["embeddings"]
    chosen = describe(build("none", max_norm=0.3, sparse=True).to("meta"), "model").modules["embeddings"]
    assert not {"max_norm", "sparse", "scale_grad_by_freq"} & plain.attributes.keys()
    assert chosen.attributes["max_norm"] == 0.3 and chosen.attributes["sparse"] is True
    assert chosen.changed_parameters == ("weight",)


def test_forwards_of_torch_are_noted_for_modules_with_children():
    modules = describe(build("attending").to("meta"), "model", shapes=True).modules
    assert [path for path, info in modules.items() if info.torch_forward] == [f"blocks.{i}.attention" for i in range(2)]
    sequential = describe(build("sequential").to("meta"), "model", shapes=True).modules
    assert sequential["blocks.0"].torch_forward and sequential["blocks.0"].kind == "block"
    assert not sequential["blocks"].torch_forward, "a list is never called"
