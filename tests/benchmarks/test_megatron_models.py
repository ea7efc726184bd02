"""The model of Megatron-DeepSpeed: its results, and which kernels Python and C++ issue."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from benchmarks.validation import megatron_models

from legoai.cost.capture import capture
from legoai.cost.trace.records import Copy, Kernel
from legoai.specs.models.families import resolve_config
from legoai.specs.models.gpt import GPT
from support.simulation.simulated import in_a_fork
from support.texts.plans import lowered

MEGATRON = """\
plan megatron
model   python("benchmarks.validation.megatron_models:gpt", preset = "1.3b", n_layers = 2, dim = 64, n_heads = 4)
cluster a100_sxm80(devices = 1)
batch   (global = 1, micro = 1, seq_len = 32)
mesh    (dp_replicate = 1)
checkpoint { layers.* = full }
loss eager
precision (param = fp32)
optimizer adamw(lr = 1e-4)
"""


@pytest.mark.parametrize(
    ("sequences", "error"), [(2, 1e-10), (3, 1e-4)], ids=["fused softmax", "softmax by operators, in fp32"]
)
def test_megatron_layers_equal_the_built_in_model(monkeypatch, sequences, error):
    """The layer that makes queries, keys and values has them head by head."""
    monkeypatch.setattr(megatron_models, "DROPPED", 0.0)
    sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "vocab_size": 16, "max_seq_len": 8}
    torch.manual_seed(0)
    stepwise = megatron_models.gpt("1.3b", **sizes).double()
    for parameter in stepwise.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # biases and scales too
    ours = GPT(resolve_config("gpt3", "1.3b", sizes)).double()
    state = dict(stepwise.state_dict())
    for name in [name for name in state if ".wqkv." in name]:
        parts = state.pop(name).unflatten(0, (2, 3, 8)).unbind(1)
        state.update(
            {
                name.replace("wqkv", made): part.flatten(0, 1)
                for made, part in zip(("wq", "wk", "wv"), parts, strict=True)
            }
        )
    ours.load_state_dict(state)
    tokens = torch.randint(16, (sequences, 8))
    torch.testing.assert_close(stepwise(tokens), ours(tokens), rtol=error, atol=error)
    for model in (stepwise, ours):
        model(tokens).square().sum().backward()
    gradients = dict(ours.named_parameters())
    for name, parameter in stepwise.named_parameters():
        if ".wqkv." in name:
            of_parts = (gradients[name.replace("wqkv", made)].grad.unflatten(0, (2, 8)) for made in ("wq", "wk", "wv"))
            expected = torch.stack(list(of_parts), dim=1).flatten(0, 2)
        else:
            expected = gradients[name].grad
        torch.testing.assert_close(parameter.grad, expected, rtol=error, atol=error, msg=name)


def _of_a_layer(text):
    found = capture(lowered(text), world=1)
    span = found.steps[-1]
    records = [one for one in found.records[span.start : span.stop] if isinstance(one, Kernel | Copy)]
    return [one for one in records if one.module.startswith("layers.1")]


def test_megatron_layers_issue_kernels_as_published_code_does():
    """One layer of two: forward, and all again in the backward pass."""
    records = in_a_fork(_of_a_layer, MEGATRON)
    backward = [one for one in records if isinstance(one, Kernel) and one.phase == "backward"]
    by_python = Counter(one.op.rpartition(".")[2] for one in backward if one.issuer == "function")
    functions = {"native_layer_norm_backward": 2, "gelu_backward": 1, "causal_softmax_backward": 1}
    assert by_python == {**functions, "dropout_add_backward": 2}
    assert Counter(one.op for one in backward)["aten.mm"] == 8
    copies = [(one.phase, one.direction, one.blocking) for one in records if isinstance(one, Copy)]
    to_device = [(phase, "host_to_device", True) for phase in ("forward",) * 2 + ("recompute",) * 3]
    assert copies == [*to_device, ("recompute", "device_to_host", True)]
    forward, again = (
        [one.op.rpartition(".")[2] for one in records if isinstance(one, Kernel) and one.phase == phase]
        for phase in ("forward", "recompute")
    )
    assert again == [*forward[:-1], "eq", "all", forward[-1]], "the loss of experts is compared with zero"
    assert forward == [
        "native_layer_norm", "addmm", "baddbmm", "causal_softmax", "native_dropout", "bmm", "clone", "addmm",
        "dropout_add", "native_layer_norm", "addmm", "gelu", "addmm", "dropout_add",
    ]  # fmt: skip
