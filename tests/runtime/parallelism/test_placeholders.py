"""Stages with placeholders: run in order, they compute the same as the whole model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from legoai.runtime import RunError
from legoai.runtime.parallelism.pipeline import StagesOfRank
from legoai.runtime.parallelism.placeholders import Placeholder, held_children, is_held, put_placeholders

WIDTH = 4
VOCABULARY = 16
STAGES = (("tokens", "positions", "blocks.0", "angles"), ("blocks.1", "angles"), ("blocks.2", "head", "angles"))


class Angles(nn.Module):
    """Numbers that depend on shapes alone, and that every stage computes itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linspace(0.5, 1.5, x.shape[1], dtype=torch.float64)[:, None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x)) * angles


class Whole(nn.Module):
    """Unpacks the shape of its tokens, and adds embeddings outside of its modules, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        self.positions = nn.Embedding(8, WIDTH, dtype=torch.float64)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.angles = Angles()
        self.head = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        _, length = tokens.shape
        x = self.tokens(tokens) + self.positions(torch.arange(length))
        angles = self.angles(x)
        for index in range(len(self.blocks)):
            x = self.blocks[index](x, angles)
        return self.head(x)


class Turned(Whole):
    """Passes [length, batch, features] through its blocks, with angles by the length of its embedding's output."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        angles = self.angles(x)[:, None]
        x = x.transpose(0, 1)
        for block in self.blocks:
            x = block(x, angles)
        return self.head(x).transpose(0, 1)


class Pairs(Whole):
    """Takes the blocks for such that return two tensors."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, _ = self.blocks[0](self.tokens(tokens), self.angles(tokens))
        x, _ = self.blocks[1](x, self.angles(tokens))
        return self.head(self.blocks[2](x, self.angles(tokens)))


def made(number: int | None = None, kind: type[Whole] = Whole) -> Whole:
    torch.manual_seed(0)
    model = kind()
    if number is not None:
        results = {"tokens": (2, 5, WIDTH)} if kind is Turned else {}
        put_placeholders(model, STAGES, number, (2, 5), results=results)
    return model


def test_stages_in_sequence_equal_the_model():
    tokens = torch.randint(VOCABULARY, (2, 5))
    through = tokens
    for number in range(3):
        through = made(number)(through)
    assert torch.equal(through, made()(tokens))


def test_stages_of_another_layout_send_contiguous_tensors_and_equal_the_model():
    tokens = torch.randint(VOCABULARY, (2, 5))
    whole = made(kind=Turned)
    whole(tokens).square().sum().backward()
    outputs, inputs = [], [tokens]
    for number in range(3):
        stage = made(number, Turned)
        outputs.append(stage(inputs[-1]))
        inputs.append(outputs[-1].detach().requires_grad_())
    torch.testing.assert_close(outputs[-1], whole(tokens), rtol=1e-12, atol=0.0)  # products of another layout
    assert all(output.is_contiguous() and output.shape == (5, 2, WIDTH) for output in outputs[:-1])
    [grad] = torch.autograd.grad(outputs[2].square().sum(), inputs[2])
    assert grad.is_contiguous() and grad.shape == (5, 2, WIDTH)


def test_stage_sends_the_declared_dtype_and_returns_gradients_in_its_own():
    stage = made()
    put_placeholders(stage, STAGES, 1, (2, 5), results={}, dtype=torch.float32)
    hidden = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    output = stage(hidden)
    assert output.dtype == torch.float32
    output.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.float64
    torch.testing.assert_close(output.double(), made(1)(hidden), rtol=1e-6, atol=1e-6)


def test_gradients_reach_every_stage():
    tokens = torch.randint(VOCABULARY, (2, 5))
    whole, stages = made(), [made(number) for number in range(3)]
    whole(tokens).square().sum().backward()
    through = tokens
    for stage in stages:
        through = stage(through)
    through.square().sum().backward()
    held = {name: parameter for stage in stages for name, parameter in stage.named_parameters()}
    assert held.keys() == dict(whole.named_parameters()).keys()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(held[name].grad, parameter.grad, rtol=0, atol=1e-14)


def test_stage_holds_its_modules_under_model_names():
    stage = made(1)
    assert [name for name, _ in stage.named_parameters()] == ["blocks.1.inner.weight", "blocks.1.inner.bias"]
    assert isinstance(stage.head, Placeholder) and not is_held(stage.blocks[0]) and is_held(stage.angles)
    assert [name for name, _ in held_children(stage.blocks)] == ["1"]


def test_stages_of_one_rank_form_one_module_without_placeholders():
    stages = [made(0), made(2)]
    union = StagesOfRank(stages)
    names = [name for name, _ in made().named_parameters() if not name.startswith("blocks.1")]
    assert [name for name, _ in union.named_parameters()] == names
    assert union.get_parameter("tokens.weight") is stages[0].tokens.weight


def test_modules_with_several_outputs_are_refused_with_a_code():
    hidden = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    with pytest.raises(RunError, match=r"RUN045.*stage 2 of 3 fails and its first module does not take what arrived"):
        made(2, Pairs)(hidden)
    with pytest.raises(RunError, match=r"RUN045.*stage 0 of 3 fails after its last module"):
        made(0, Pairs)(torch.zeros(2, 5, dtype=torch.int64))
