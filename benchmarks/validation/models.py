"""Models as measured software ran them, where that is not what the installed `transformers` or our own models run.

Plans of published runs name these factories:
`model python("benchmarks.validation.models:causal", config = "llama3_1b")`.

`transformers` 4.46, of the autumn of 2024, repeats keys and values for the query heads that share them, computes T5's
attention step by step, keeps all keys and values until the loss is known, as `use_cache` is on, and computes the loss
inside the model: on logits shifted by one token, which for more than one sequence is a copy, in fp32 for Llama and
Gemma, and in their own dtype for GPT-2 and T5. Such a model returns its loss as the logit of a single class at every
position, so that the trainer's own loss adds nothing. Composer computes the metrics of llm-foundry's models again from
the logits of each micro batch. TorchTitan's Llama of 2024 computes its norms in single steps, rotates complex numbers
in fp32 and repeats keys and values. minGPT of 2021 computes attention in single steps, and drops a tenth of the shares
and of what attention and MLP add to the stream.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from legoai.runtime.torch_internals.operators import call_behind_backward
from legoai.specs.models import decoder
from legoai.specs.models.families import resolve_config
from legoai.specs.models.gpt import GPT, MLP, Attention
from legoai.specs.models.huggingface import transformers_model
from legoai.specs.models.llama import FeedForward, Llama
from legoai.specs.models.reads import Images

_ZOO = Path(__file__).parents[2] / "plans" / "zoo"
_ATTENTION = "sdpa_of_2024"
_T5_ATTENTION = "t5_of_2024"


def causal(config: str, *, loss_in_fp32: bool = True) -> nn.Module:
    """Build a causal language model with the attention and the loss of `transformers` 4.46.

    Args:
        config: the name of a file in `plans/zoo`.
        loss_in_fp32: whether the loss casts the logits.
    """
    model = transformers_model(_fields(config), attn_implementation=_registered())
    model.__dict__["loss_in_fp32"] = loss_in_fp32
    return _with_loss(model, _NextToken)


def encoder_decoder(config: str, **fields: Any) -> nn.Module:
    """Build T5 with the attention and the loss of `transformers` 4.46.

    Args:
        config: the name of a file in `plans/zoo`.
        fields: of the config to use instead.
    """
    _registered()
    return _with_loss(transformers_model(_fields(config) | fields, attn_implementation=_T5_ATTENTION), _SecondText)


def images_with_texts(config: str) -> nn.Module:
    """Build CLIP as `transformers` has it; its attention and its loss cost as they did."""
    return transformers_model(_fields(config))


def images(name: str, *, size: int) -> nn.Module:
    """Build a classifier of images of `timm`.

    Args:
        name: as `timm.create_model` takes it; no weights are downloaded.
        size: height and width of the images.
    """
    import timm

    model = timm.create_model(name, pretrained=False)
    model.reads = Images(channels=3, height=size, width=size, classes=model.num_classes)
    return model


def torchtitan_llama(preset: str, **dimensions: Any) -> nn.Module:
    """Build our Llama with the norms, rotations and repeated keys and values of TorchTitan in 2024.

    Args:
        preset: of `llama3`.
        dimensions: fields of its config to use instead.
    """
    model = Llama(resolve_config("llama3", preset, dimensions))  # type: ignore[arg-type]
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.__class__ = _StepwiseNorm
        elif isinstance(module, decoder.Attention):
            module.__class__ = _RepeatingAttention
    return model


def mpt(preset: str, **dimensions: Any) -> nn.Module:
    """Build our GPT with the metrics that Composer computes of llm-foundry's MPT in training.

    Args:
        preset: of `gpt3`.
        dimensions: fields of its config to use instead.
    """
    model = GPT(resolve_config("gpt3", preset, dimensions))  # type: ignore[arg-type]
    model.__class__ = _WithTrainMetrics
    return model


def min_gpt(preset: str, **dimensions: Any) -> nn.Module:
    """Build our GPT with the attention, the GELU and the dropout of minGPT in 2021.

    Args:
        preset: of `gpt3`.
        dimensions: fields of its config to use instead.
    """
    model = GPT(resolve_config("gpt3", preset, dimensions))  # type: ignore[arg-type]
    for module in model.modules():
        if isinstance(module, Attention):
            module.__class__ = _MinAttention
        elif isinstance(module, MLP):
            module.__class__ = _MinMLP
    return model


_DROPPED = 0.1
"""minGPT's `attn_pdrop` and `resid_pdrop`."""


class _MinAttention(Attention):
    """`CausalSelfAttention` of minGPT's `model.py`; its buffer, the mask, is made where it is read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix positions, as the class above does."""
        b, t, width = x.shape
        k_bhtd = self.wk(x).view(b, t, self.n_heads, -1).transpose(1, 2)
        q_bhtd = self.wq(x).view(b, t, self.n_heads, -1).transpose(1, 2)
        v_bhtd = self.wv(x).view(b, t, self.n_heads, -1).transpose(1, 2)
        scores_bhts = (q_bhtd @ k_bhtd.transpose(-2, -1)) * self.head_dim**-0.5
        earlier = torch.ones(1, 1, t, t, device=x.device).tril()
        shares_bhts = F.softmax(scores_bhts.masked_fill(earlier == 0, float("-inf")), dim=-1)
        mixed_bhtd = F.dropout(shares_bhts, _DROPPED, training=self.training) @ v_bhtd
        mixed = self.wo(mixed_bhtd.transpose(1, 2).contiguous().view(b, t, width))
        return F.dropout(mixed, _DROPPED, training=self.training)


class _MinMLP(MLP):
    """`mlp` of its `Block`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform each position by itself, as the class above does but for the form of GELU."""
        return F.dropout(self.down(F.gelu(self.up(x))), _DROPPED, training=self.training)


class _WithTrainMetrics(GPT):
    """`ComposerMPTCausalLM` with `use_train_metrics`, which is the default: cross entropy and perplexity.

    Each is `torch.nn.CrossEntropyLoss` on the logits, behind the backward of the micro batch and under autocast, which
    casts to fp32 (Composer's `trainer.py`, `_train_microbatch`, and `metrics/nlp.py`).
    """

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits, and compute metrics after their backward, which are not read here."""
        logits = super().forward(tokens, positions)
        if logits.requires_grad:
            kept = logits.detach()
            logits.register_hook(lambda _: call_behind_backward(lambda: _metrics(kept, tokens)))
        return logits


def _metrics(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    """Compute cross entropy and perplexity of logits [B, T, V]."""
    with torch.no_grad():
        for _ in ("cross entropy", "perplexity"):
            F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten(), reduction="sum")


def llama_with_swiglu_in_one_kernel(preset: str, **dimensions: Any) -> nn.Module:
    """Build our Llama with a SwiGLU that saves its inputs only, like Megatron's kernel.

    Args:
        preset: a preset of `llama3`.
        dimensions: fields of its config to use instead.
    """
    model = Llama(resolve_config("llama3", preset, dimensions))  # type: ignore[arg-type]
    for module in model.modules():
        if isinstance(module, FeedForward):
            module.__class__ = _OneKernelFeedForward
    return model


class _OneKernelFeedForward(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform each position by itself, as the class above does."""
        return self.w2(_SwiGlu.apply(self.w1(x), self.w3(x)))


class _SwiGlu(torch.autograd.Function):
    """`silu(gate) * up`, of which the backward computes the sigmoid again."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        grad_up = grad * F.silu(gate)
        return torch.ops.aten.silu_backward(grad * up, gate), grad_up


class _StepwiseNorm(nn.RMSNorm):
    """`torchtitan/models/norms.py`: every step is a kernel, and autograd saves each one's inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dim."""
        full = x.float()
        normalised = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + self.eps)
        return normalised.type_as(x) * self.weight


class _RepeatingAttention(decoder.Attention):
    """`torchtitan/models/llama/model.py`."""

    def forward(self, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """Mix positions, as the class above does."""
        b, t, _ = x.shape
        q_bthd = _rotated(self.wq(x).view(b, t, -1, self.head_dim), rope[:t])
        k_bthd = _rotated(self.wk(x).view(b, t, -1, self.head_dim), rope[:t])
        v_bthd = self.wv(x).view(b, t, -1, self.head_dim)
        times = self.n_heads // self.n_kv_heads
        mixed_bhtd = F.scaled_dot_product_attention(
            q_bthd.transpose(1, 2), _repeated(k_bthd, times).transpose(1, 2), _repeated(v_bthd, times).transpose(1, 2),
            is_causal=True,
        )  # fmt: skip
        return self.wo(mixed_bhtd.transpose(1, 2).contiguous().view(b, t, -1))


def _rotated(x_bthd: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x_bthd.float().reshape(*x_bthd.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rope.view(1, *rope.shape[:1], 1, rope.shape[-1])).flatten(3).type_as(x_bthd)


def _repeated(x_bthd: torch.Tensor, times: int) -> torch.Tensor:
    if times == 1:
        return x_bthd
    b, t, heads, width = x_bthd.shape
    return x_bthd.unsqueeze(3).expand(b, t, heads, times, width).reshape(b, t, heads * times, width)


def _fields(config: str) -> dict[str, Any]:
    return json.loads((_ZOO / f"{config}.json").read_text(encoding="utf-8"))


def _with_loss(model: nn.Module, mixin: type[nn.Module]) -> nn.Module:
    made = type(model)
    model.__class__ = type(made.__name__, (mixin, made), {"__module__": made.__module__})
    return model


class _NextToken(nn.Module):
    """The loss of `LlamaForCausalLM` and its like, in the model."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss at every position: int64 [B, T] to [B, T, 1]."""
        logits = super().forward(tokens)
        values = logits.float() if self.__dict__["loss_in_fp32"] else logits
        moved = values[:, :-1].contiguous()
        loss = F.cross_entropy(moved.flatten(0, 1), tokens[:, 1:].flatten())
        _forget(self)
        return loss.expand(*tokens.shape, 1)


class _SecondText(nn.Module):
    """The loss of `T5ForConditionalGeneration`, in the model."""

    def forward(self, tokens: torch.Tensor, decoder_tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss at every position: int64 [B, S] and [B, T] to [B, T, 1]."""
        logits = super().forward(tokens, decoder_tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), decoder_tokens.flatten())
        _forget(self)
        return loss.expand(*decoder_tokens.shape, 1)


_CACHED = "keys_and_values"


def _forget(model: nn.Module) -> None:
    """Free the keys and values of all blocks, as the model's result is not kept."""
    for module in model.modules():
        module.__dict__.pop(_CACHED, None)


def _registered() -> str:
    """Register the attention of `transformers` 4.46 with the installed version, and return its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask

    AttentionInterface.register(_ATTENTION, _attend)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
    AttentionInterface.register(_T5_ATTENTION, _attend_with_bias)
    AttentionMaskInterface.register(_T5_ATTENTION, eager_mask)
    return _ATTENTION


def _attend(  # noqa: PLR0917, the order is that of `transformers`
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """`LlamaSdpaAttention` and its like, from queries [B, heads, T, width] to [B, T, heads, width]."""
    module.__dict__[_CACHED] = key, value
    times = getattr(module, "num_key_value_groups", 1)
    if times > 1:
        key, value = (_repeated(item.transpose(1, 2), times).transpose(1, 2) for item in (key, value))
    mixed = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, is_causal=attention_mask is None, scale=scaling
    )
    return mixed.transpose(1, 2).contiguous(), None


def _attend_with_bias(  # noqa: PLR0917, as above
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    dropout: float = 0.0, position_bias: torch.Tensor | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """`T5Attention`: scores, to which the bias by distance and the mask are added, and their softmax in fp32."""
    module.__dict__[_CACHED] = key, value
    scores = torch.matmul(query, key.transpose(3, 2))
    assert position_bias is not None
    scores += position_bias if attention_mask is None else position_bias + attention_mask
    shares = F.softmax(scores.float(), dim=-1).type_as(scores)
    shares = F.dropout(shares, p=dropout, training=module.training)
    return torch.matmul(shares, value).transpose(1, 2).contiguous(), None
