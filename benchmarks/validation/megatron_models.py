"""GPT as Megatron-DeepSpeed ran it in 2023, which plans of vTrain's runs name as their model.

Read for this: `megatron/model/transformer.py`, `fused_layer_norm.py`, `fused_bias_gelu.py`, `fused_softmax.py` and
`megatron/mpu/layers.py` of github.com/microsoft/Megatron-DeepSpeed at `f01c9e6` (June 2023). vTrain's own copy of the
model has the same layers (`src/model` of github.com/VIA-Research/vTrain).

Layer norm, softmax and GELU are Python autograd functions around kernels: their backward is issued from Python. Linear
layers are `F.linear`, whose backward is autograd's own. Bias, dropout and addition are one TorchScript function, bias
and GELU another: here as many kernels, with the bias in the layer in front. Each layer makes two scalars on the device
out of numbers of the host, for experts that it does not have: a blocking copy each, at which the host waits until the
device has done everything before. A checkpoint there recomputes a block to its end; torch's stops where nothing more is
needed, which here is the last dropout, so that the last product is recomputed too.
Then it compares the block's second result, the loss of experts, with zero on the device (`megatron/mpu/random.py`):
another scalar is copied, and the host waits for the answer. Here this happens before the last addition, where the
recomputation has not stopped yet.

Softmax is one kernel only where the heads of all sequences on a rank are a multiple of four. Otherwise torch's own
operators convert, scale, mask and normalise the scores in fp32, as `--no-query-key-layer-scaling` was not given.

The host time of its Python, such as the functions at the edges of tensor parallelism, the state of the random
generators, which each dropout of attention and each checkpoint read and write, and TorchScript's interpreter, is that
of its own layers (`../megatron_host.py`).

Not stated: that outside of attention the sequence is the first dimension, before the batch, so that attention here
copies its inputs where a micro batch has several sequences; and dropout after the embedding.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_variadic

from legoai.runtime.torch_internals.operators import running_backward
from legoai.specs.models.families import resolve_config
from legoai.specs.models.gpt import GPT, MLP, Block
from legoai.specs.models.layers import Linear, residual_std

DROPPED: Final = 0.1
"""`--attention-dropout` and `--hidden-dropout`, by default."""


def gpt(preset: str, **dimensions: Any) -> nn.Module:
    """Build our GPT with the layers of Megatron-DeepSpeed in 2023.

    Args:
        preset: of `gpt3`.
        dimensions: fields of its config to use instead.
    """
    config = resolve_config("gpt3", preset, dimensions)
    model = GPT(config)  # type: ignore[arg-type]
    for block in model.layers.values():
        block.attention = _Attention(config)
        block.__class__ = _Layer
        block.mlp.__class__ = _MLP
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.__class__ = Norm
    return model


class _Layer(Block):
    """`ParallelTransformerLayer`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Advance the residual stream by one block: [B, T, dim] to [B, T, dim]."""
        dropped = DROPPED if self.training else 0.0
        x = add(self.attention(self.attention_norm(x)), x, dropped)
        normalised = self.mlp_norm(x)
        loss, _ = (torch.zeros((), dtype=x.dtype, device="cpu").to(x.device) for _ in ("loss of experts", "their bias"))
        output = self.mlp(normalised)
        if running_backward():
            bool((loss == torch.zeros((), dtype=x.dtype, device="cpu").to(x.device)).all())
        return add(output, x, dropped)


class _MLP(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform each position by itself: [..., dim] to [..., dim]."""
        return self.down(_Gelu.apply(self.up(x)))


class _Gelu(torch.autograd.Function):
    """`GeLUFunction`, of a tensor that has its bias."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x, approximate="tanh")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.gelu_backward(grad, *ctx.saved_tensors, approximate="tanh")


class Norm(nn.LayerNorm):
    """`MixedFusedLayerNorm`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dim."""
        return _Normalise.apply(x, self.weight, self.bias, self.eps)


class _Normalise(torch.autograd.Function):
    """`FusedLayerNormAffineFunction`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Any:
        out, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        found = torch.ops.aten.native_layer_norm_backward(grad, x, weight.shape, mean, rstd, weight, bias, [True] * 3)
        return *found, None


class _Attention(nn.Module):
    """`ParallelAttention`, without FlashAttention.

    One layer computes queries, keys and values, of each head one after the other. One batched product computes
    and scales the scores; a tenth of the shares is dropped.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim = config.head_size
        self.wqkv = Linear(config.dim, 3 * config.dim, bias=config.bias)
        self.wo = Linear(config.dim, config.dim, bias=config.bias, init_std=residual_std(config.n_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix positions: [B, T, dim] to [B, T, dim]."""
        b, t, _ = x.shape
        heads_tbnd = self.wqkv(x.transpose(0, 1).contiguous()).view(t, b, -1, 3 * self.head_dim)
        q_zsd, k_zsd, v_zsd = (part.view(t, -1, self.head_dim).transpose(0, 1) for part in heads_tbnd.chunk(3, dim=-1))
        scores_zst = torch.baddbmm(
            q_zsd.new_empty(len(q_zsd), t, t), q_zsd, k_zsd.transpose(1, 2), beta=0.0, alpha=self.head_dim**-0.5
        )
        shares_zst = F.dropout(_softmax(scores_zst), p=DROPPED, training=self.training)
        mixed_bntd = torch.bmm(shares_zst, v_zsd).view(b, -1, t, self.head_dim)
        mixed_tbnd = mixed_bntd.permute(2, 0, 1, 3).contiguous()
        return self.wo(mixed_tbnd.view(t, b, -1)).transpose(0, 1)


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    """`FusedScaleMaskSoftmax`, of scores [Z, T, T] for Z heads of sequences."""
    if len(scores) % 4 == 0:
        return _causal_softmax(scores)
    exact = scores.float() * 1.0  # the layer's number, by which Megatron has divided the scores
    return _mask_later(exact).softmax(-1).type_as(scores)


@torch.library.custom_op("megatron_of_2023::causal_softmax", mutates_args=())
def _causal_softmax(scores: torch.Tensor) -> torch.Tensor:
    """`ScaledUpperTriangMaskedSoftmax`, of scores [..., T, T]: one kernel, which reads and writes them once."""
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1)


@torch.library.custom_op("megatron_of_2023::causal_softmax_backward", mutates_args=())
def _causal_softmax_backward(grad: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    return shares * (grad - (grad * shares).sum(-1, keepdim=True))


_causal_softmax.register_fake(torch.empty_like)
_causal_softmax_backward.register_fake(lambda grad, _: torch.empty_like(grad))
_causal_softmax.register_autograd(
    lambda ctx, grad: _causal_softmax_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


@torch.library.custom_op("megatron_of_2023::mask_later", mutates_args=())
def _mask_later(scores: torch.Tensor) -> torch.Tensor:
    """`attention_mask_func`, of scores [..., T, T]: one kernel, which fills those of later positions."""
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -torch.inf)


@torch.library.custom_op("megatron_of_2023::mask_later_backward", mutates_args=())
def _mask_later_backward(grad: torch.Tensor) -> torch.Tensor:
    return grad.tril()


_mask_later.register_fake(torch.empty_like)
_mask_later_backward.register_fake(torch.empty_like)
_mask_later.register_autograd(lambda _, grad: _mask_later_backward(grad))


def add(branch: torch.Tensor, residual: torch.Tensor, dropped: float) -> torch.Tensor:
    """`bias_dropout_add_fused_train`, of a branch that has its bias: one kernel.

    An inspection of the model sees it as the addition that it is.
    """
    if has_torch_function_variadic(branch, residual):
        found: torch.Tensor = handle_torch_function(add, (branch, residual), branch, residual, dropped)
        return found
    return _dropout_add(branch, residual, dropped)[0]


@torch.library.custom_op("megatron_of_2023::dropout_add", mutates_args=())
def _dropout_add(branch: torch.Tensor, residual: torch.Tensor, dropped: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`residual + dropout(branch)`, and which elements it kept."""
    kept = torch.rand_like(branch) >= dropped
    return residual + branch * kept / (1 - dropped), kept


@torch.library.custom_op("megatron_of_2023::dropout_add_backward", mutates_args=())
def _dropout_add_backward(grad: torch.Tensor, kept: torch.Tensor, dropped: float) -> torch.Tensor:
    return grad * kept / (1 - dropped)


def _differentiate(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    return _dropout_add_backward(grad, *ctx.saved_tensors, ctx.dropped), grad, None


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.set_materialize_grads(False)  # of what was kept
    ctx.dropped = inputs[-1]


_dropout_add.register_fake(lambda x, y, _: (torch.empty_like(y), torch.empty_like(x, dtype=torch.bool)))
_dropout_add_backward.register_fake(lambda grad, kept, _: torch.empty_like(kept, dtype=grad.dtype))
_dropout_add.register_autograd(_differentiate, setup_context=_remember)
