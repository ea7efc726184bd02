"""Models of published runs: their operators are those of the software that was measured."""

from __future__ import annotations

import pytest
import torch
from benchmarks.validation import models

_SMALL = {"n_layers": 2, "dim": 16, "n_heads": 2, "vocab_size": 32, "max_seq_len": 8}


def test_composer_computes_metrics_after_each_backward(monkeypatch):
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


def test_loss_inside_the_model_gives_equal_gradients():
    """Against `transformers`' own attention and loss, in fp32 both, on a small Llama whose keys are shared."""
    transformers = pytest.importorskip("transformers")
    fields = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    }  # fmt: skip
    torch.manual_seed(0)
    ours = models._with_loss(
        models.transformers_model(fields, attn_implementation=models._registered()), models._NextToken
    ).double()
    ours.__dict__["loss_in_fp32"] = False
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).double()
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randint(64, (3, 12))
    losses = ours(tokens), theirs(tokens, labels=tokens).loss
    assert losses[0].shape == (3, 12, 1)
    for loss in (losses[0].mean(), losses[1]):
        loss.backward()
    assert losses[0].mean().item() == pytest.approx(losses[1].item(), rel=1e-6)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-7, msg=name)
    assert not any(models._CACHED in module.__dict__ for module in ours.modules())


def test_torchtitan_llama_equals_built_in_llama():
    """Equal outputs with the features of queries and keys permuted for rotations of neighbouring pairs."""
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 64, "vocab_size": 64}
    torch.manual_seed(0)
    theirs = models.torchtitan_llama("8b", **sizes, max_seq_len=16).double()
    ours = models.Llama(models.resolve_config("llama3", "8b", {**sizes, "max_seq_len": 16})).double()
    state = theirs.state_dict()
    for name, weight in state.items():
        if name.endswith(("wq.weight", "wk.weight")):  # neighbours (2i, 2i + 1) become (i, i + half)
            state[name] = weight.unflatten(0, (-1, 4, 2)).transpose(1, 2).flatten(0, 2)
    ours.load_state_dict(state)
    tokens = torch.randint(64, (2, 16))
    torch.testing.assert_close(theirs(tokens), ours(tokens), rtol=1e-5, atol=1e-6)  # theirs rotates in fp32


def test_min_gpt_equals_built_in_gpt_without_dropout(monkeypatch):
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 64, "max_seq_len": 16}
    torch.manual_seed(0)
    theirs = models.min_gpt("1.3b", **sizes).double().eval()
    ours = models.GPT(models.resolve_config("gpt3", "1.3b", sizes)).double()
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.randint(64, (2, 16))
    gelu = torch.nn.functional.gelu
    monkeypatch.setattr(models.F, "gelu", lambda x, approximate="tanh": gelu(x, approximate=approximate))
    torch.testing.assert_close(theirs(tokens), ours(tokens))
    assert not torch.equal(theirs.train()(tokens), theirs(tokens))


def test_fused_swiglu_equals_built_in_swiglu():
    sizes = {"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "hidden_dim": 32, "vocab_size": 16}
    config = models.resolve_config("llama3", "8b", {**sizes, "max_seq_len": 8})
    one, ours = models.llama_with_swiglu_in_one_kernel("8b", **sizes, max_seq_len=8).double(), models.Llama(config)
    ours.double().load_state_dict(one.state_dict())
    tokens = torch.randint(16, (2, 8))
    torch.testing.assert_close(one(tokens), ours(tokens))
    for model in (one, ours):
        model(tokens).square().sum().backward()
    for mine, other in zip(one.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
