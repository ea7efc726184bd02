"""Names of operators whose outputs selective checkpointing saves, as torch has them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from legoai.runtime import RunError, keep_outputs
from legoai.runtime.recomputation.policies import is_composed, operators
from legoai.runtime.torch_internals.operators import OpOverload


def test_operator_names_match_with_and_without_overload():
    assert operators("aten.mm.default") == {torch.ops.aten.mm.default}
    assert torch.ops.aten.mm.default in operators("aten.mm")
    assert torch.ops.aten.mm.out not in operators("aten.mm")


@pytest.mark.parametrize("name", ["aten.nm", "aten.mm.defualt", "aten", "nowhere.mm", "aten.mm.default.more", ""])
def test_unknown_operator_name_is_an_error_at_the_start(name: str):
    with pytest.raises(RunError, match=rf'RUN043.*no operator "{name}"'):
        keep_outputs("matmul", name)


@pytest.mark.parametrize("name", ["aten.relu_", "aten.bernoulli_.float", "aten.native_dropout", "aten.rand_like"])
def test_in_place_and_random_operators_cannot_be_saved(name: str):
    with pytest.raises(RunError, match=r"RUN043.*(in place|random numbers), and what it computes cannot be kept"):
        keep_outputs(name)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: set[OpOverload] = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.operators.add(operator)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("aten.linear", lambda x: torch.nn.functional.linear(x, x[0])),
        ("aten.matmul", lambda x: x @ x),
        ("aten.softmax", lambda x: x.softmax(-1)),
        ("aten.rms_norm", lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:])),
        ("aten.einsum", lambda x: torch.einsum("bij,bjk->bik", x, x)),
        ("aten.scaled_dot_product_attention", lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x)),
    ],
)
def test_operators_that_others_compute_cannot_be_saved(name: str, call: Callable[[torch.Tensor], torch.Tensor]):
    with pytest.raises(RunError, match=r"RUN043.*computed by others"):
        keep_outputs(name)
    with Seen() as seen:
        call(torch.zeros(2, 4, 4, requires_grad=True))
    assert seen.operators and not any(str(item).startswith(f"{name}.") for item in seen.operators)
    assert not any(is_composed(item) for item in seen.operators)
