"""Loss that computes the last layer in pieces: its value, its gradients, its memory, and the model around it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from legoai.runtime.last_layer import last_layer_cross_entropy
from legoai.runtime.loss import token_cross_entropy

BATCH, TOKENS, FEATURES, VOCABULARY = 2, 24, 16, 50
PIECES = 6


class Model(nn.Module):
    """Embedding, norm and output layer."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, FEATURES)
        self.norm = nn.LayerNorm(FEATURES)
        self.output = nn.Linear(FEATURES, VOCABULARY, bias=bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.norm(self.embedding(tokens)))


def sample() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (BATCH, TOKENS + 1))
    return tokens[:, :-1], tokens[:, 1:]


def model_of(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> Model:
    torch.manual_seed(0)
    return Model(bias=bias).to(dtype)


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("pieces", [2, 5, TOKENS])
@pytest.mark.parametrize("frozen", [(), ("output",), ("embedding", "norm")])
def test_loss_and_gradients_equal_those_of_the_whole_loss(pieces: int, frozen: tuple[str, ...]):
    whole = model_of()
    for name in frozen:
        whole.get_submodule(name).requires_grad_(False)
    parts = copy.deepcopy(whole)
    tokens, targets = sample()
    expected = token_cross_entropy(whole(tokens), targets)
    loss = last_layer_cross_entropy(parts, "output", pieces=pieces)
    for _ in range(2):  # gradients of two micro batches are added
        (token_cross_entropy(whole(tokens), targets) / 4).backward()
        found = loss(parts(tokens), targets)
        (found / 4).backward()
    assert_close(found, expected, rtol=0, atol=1e-14)
    assert_close(gradients(parts), gradients(whole), rtol=0, atol=1e-15)
    with torch.no_grad():
        assert_close(loss(parts(tokens), targets), expected, rtol=0, atol=1e-14)


def test_products_follow_autocast_and_gradients_have_the_dtype_of_parameters():
    whole = model_of(torch.float32)
    parts = copy.deepcopy(whole)
    tokens, targets = sample()
    loss = last_layer_cross_entropy(parts, "output", pieces=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = token_cross_entropy(whole(tokens), targets)
        found = loss(parts(tokens), targets)
    expected.backward()
    found.backward()
    assert_close(found, expected, rtol=1e-5, atol=0)
    for name, gradient in gradients(parts).items():
        assert gradient is not None and gradient.dtype == torch.float32
        assert_close(gradient, gradients(whole)[name], rtol=0, atol=5e-4)  # 8 bits of a bf16


class CallingUnder(Model):
    """Calls its last layer in a mode of its own."""

    def __init__(self, mode: Callable[[], contextlib.AbstractContextManager]) -> None:
        super().__init__()
        self.mode = mode

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(tokens))
        with self.mode():
            return self.output(x)


FP32 = partial(torch.autocast, "cpu", enabled=False)
BF16 = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize(("own", "around"), [(FP32, BF16), (BF16, contextlib.nullcontext), (BF16, FP32)])
def test_products_follow_the_autocast_in_which_forward_calls_the_layer(own, around):
    torch.manual_seed(0)
    whole = CallingUnder(own)
    parts = copy.deepcopy(whole)
    tokens, targets = sample()
    loss = last_layer_cross_entropy(parts, "output", pieces=3)
    with around():
        expected = token_cross_entropy(whole(tokens), targets)
        found = loss(parts(tokens), targets)
    expected.backward()
    found.backward()
    assert_close(found, expected, rtol=1e-6, atol=0)  # products in the other dtype are off by 1e-4
    for name, gradient in gradients(parts).items():
        bits = 1e-7 if own is FP32 else 5e-4
        assert_close(gradient, gradients(whole)[name], rtol=0, atol=bits)


def test_layer_that_forward_calls_without_gradients_gets_none():
    torch.manual_seed(0)
    whole = CallingUnder(torch.no_grad)
    tokens, targets = sample()
    expected = token_cross_entropy(whole(tokens), targets)
    loss = last_layer_cross_entropy(whole, "output", pieces=3)
    found = loss(whole(tokens), targets)
    assert_close(found, expected)
    assert not found.requires_grad and not expected.requires_grad


class LargestLogits(TorchDispatchMode):
    """Notes the most elements of a result whose last dim is the vocabulary, other than the layer's weight, turned."""

    most = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, torch.Tensor) and item.shape[-1:] == (VOCABULARY,) and item.shape[:1] != (FEATURES,):
                self.most = max(self.most, item.numel())
        return result


def test_only_the_logits_of_one_piece_exist():
    model = model_of(torch.bfloat16, bias=False)
    loss = last_layer_cross_entropy(model, "output", pieces=PIECES)
    tokens, targets = sample()
    with LargestLogits() as seen:
        loss(model(tokens), targets).backward()
    assert seen.most == BATCH * TOKENS * VOCABULARY // PIECES


def test_model_keeps_its_layer_outside_of_forward():
    model = model_of()
    names, layer = list(model.state_dict()), model.output
    last_layer_cross_entropy(model, "output", pieces=PIECES)
    tokens, _ = sample()
    assert model(tokens).shape == (BATCH, TOKENS, FEATURES)
    with pytest.raises(IndexError):
        model(tokens + VOCABULARY)
    assert model.output is layer and list(model.state_dict()) == names
    assert model.output(torch.zeros(1, 1, FEATURES).double(), targets=torch.zeros(1, 1).long()).shape == ()


class ReadingItsLayer(Model):
    """Casts to the dtype of its layer's weight, and divides by what is computed of that."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(tokens))
        return self.output(x.to(self.output.weight.dtype) / self.output.weight.norm())


def test_forward_may_read_the_layer_that_it_passes_over():
    torch.manual_seed(0)
    whole = ReadingItsLayer().double()
    parts = copy.deepcopy(whole)
    tokens, targets = sample()
    loss = last_layer_cross_entropy(parts, "output", pieces=PIECES)
    token_cross_entropy(whole(tokens), targets).backward()
    loss(parts(tokens), targets).backward()
    assert_close(gradients(parts), gradients(whole), rtol=0, atol=1e-15)


def test_loss_has_one_backward_pass():
    model = model_of()
    loss = last_layer_cross_entropy(model, "output", pieces=PIECES)
    tokens, targets = sample()
    found = loss(model(tokens), targets)
    found.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        found.backward()
