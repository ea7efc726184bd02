"""DeepSeek-V2 and -V3 as one device would run them: latent attention, and mixtures with shared experts."""

# mypy: no-warn-return-any
from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from legoai.specs.models import mixtral
from legoai.specs.models.configs import DeepSeekConfig
from legoai.specs.models.decoder import RotaryDecoder, TransformerBlock, apply_rotary
from legoai.specs.models.layers import Linear, exact_dtype, residual_std
from legoai.specs.models.llama import FeedForward


class SharedKey(nn.Module):
    """The rotated part of keys, one for all heads: a module of its own, so that `shard` can name its result."""

    def forward(self, k: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """Rotate `k` [B, T, rope_head_dim] by `rope` [T, rope_head_dim / 2]; returns [B, T, 1, rope_head_dim]."""
        return apply_rotary(k.unsqueeze(2), rope, interleaved=True)


class LatentAttention(nn.Module):
    """Causal multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

    Keys and values of all heads are computed from one narrow latent, `wkv_b(kv_norm(wkv_a x))`, and so are queries
    where `q_lora_rank` is given. Positions rotate other features than those: of each head's queries, and of one key for
    all heads.
    """

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.head_dim = config.head_size
        self.v_head_dim = config.v_head_dim
        self.rope_head_dim = config.rope_head_dim
        self.kv_lora_rank = config.kv_lora_rank
        self.scale = attention_scale(config)
        queries = config.n_heads * config.head_size
        self.wq = self.wq_a = self.q_norm = self.wq_b = None
        if config.q_lora_rank:
            self.wq_a = Linear(config.dim, config.q_lora_rank, bias=False)
            self.q_norm = nn.RMSNorm(config.q_lora_rank, eps=config.norm_eps)
            self.wq_b = Linear(config.q_lora_rank, queries, bias=False)
        else:
            self.wq = Linear(config.dim, queries, bias=False)
        self.wkv_a = Linear(config.dim, config.kv_lora_rank + config.rope_head_dim, bias=False)
        self.kv_norm = nn.RMSNorm(config.kv_lora_rank, eps=config.norm_eps)
        self.wkv_b = Linear(config.kv_lora_rank, config.n_heads * config.key_value_size, bias=False)
        self.k_rope = SharedKey()
        self.wo = Linear(
            config.n_heads * config.v_head_dim, config.dim, bias=False, init_std=residual_std(config.n_layers)
        )

    def forward(self, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """Mix positions: `x` is [B, T, dim], `rope` is [at least T, rope_head_dim / 2]; returns [B, T, dim]."""
        b, t, _ = x.shape
        nope = self.head_dim - self.rope_head_dim
        if self.wq is not None:
            q = self.wq(x)
        else:
            assert self.wq_a is not None and self.q_norm is not None and self.wq_b is not None
            q = self.wq_b(self.q_norm(self.wq_a(x)))
        q_nope, q_rope = q.view(b, t, -1, self.head_dim).split([nope, self.rope_head_dim], dim=-1)
        q_bthd = torch.cat((q_nope, apply_rotary(q_rope, rope[:t], interleaved=True)), dim=-1)
        latent, k_rope = self.wkv_a(x).split([self.kv_lora_rank, self.rope_head_dim], dim=-1)
        kv_bthd = self.wkv_b(self.kv_norm(latent)).view(b, t, -1, nope + self.v_head_dim)
        k_nope, v_bthd = kv_bthd.split([nope, self.v_head_dim], dim=-1)
        shared = self.k_rope(k_rope, rope[:t]).expand(-1, -1, k_nope.shape[2], -1)
        mixed_bhtd = F.scaled_dot_product_attention(
            q_bthd.transpose(1, 2),
            torch.cat((k_nope, shared), dim=-1).transpose(1, 2),
            v_bthd.transpose(1, 2),
            is_causal=True,
            scale=self.scale,
        )
        return self.wo(mixed_bhtd.transpose(1, 2).reshape(b, t, -1))


def attention_scale(config: DeepSeekConfig) -> float:
    """Return the factor of scores: `1 / sqrt(head_size)`, and more where YaRN stretches (`rope_mscale`)."""
    return config.head_size**-0.5 * (0.1 * config.rope_mscale * math.log(config.rope_scaling) + 1) ** 2


class MoE(mixtral.MoE):
    """A mixture in which every token visits the shared experts too; no token is dropped.

    V2 scores experts by a softmax (its sections 2.2.1 and 2.2.2), V3 by a sigmoid (its section 2.1.2). V3 adds a bias
    to the scores by which it chooses, and not to the weights: no gradient reaches it. It is part of the model's state,
    and nothing here changes it in training.
    """

    selection_bias: torch.Tensor | None

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__(config)
        self.n_groups = config.n_groups
        self.top_groups = config.top_groups
        self.normalize = config.normalize_weights
        self.scaling = config.routed_scaling
        self.shared = FeedForward(config.dim, config.n_shared_experts * config.hidden_dim, n_layers=config.n_layers)
        self.register_buffer("selection_bias", torch.zeros(config.n_experts) if config.scores == "sigmoid" else None)

    def init_buffers(self) -> None:
        """Set the bias to zero in place."""
        if self.selection_bias is not None:
            self.selection_bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform each position by itself: [B, T, dim] to [B, T, dim]."""
        return super().forward(x) + self.shared(x)

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights of each row's experts, [rows, top_k], and their numbers, by the router's logits."""
        exact = logits.to(exact_dtype(logits))
        scores = exact.softmax(-1) if self.selection_bias is None else exact.sigmoid()
        chosen = self._within_groups(scores.detach()).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.scaling, chosen

    def _within_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores by which experts are chosen, those outside of the best groups with `-inf`.

        A group is as good as its best expert (V2), or as its best two together (V3).
        """
        if self.selection_bias is not None:
            scores = scores + self.selection_bias.to(scores.dtype)
        if self.n_groups == 1:
            return scores
        groups = scores.view(*scores.shape[:-1], self.n_groups, -1)
        best = groups.amax(-1) if self.selection_bias is None else groups.topk(2, dim=-1).values.sum(-1)
        taken = best.topk(self.top_groups, dim=-1).indices
        left_out = torch.ones_like(best, dtype=torch.bool).scatter(-1, taken, False)
        return groups.masked_fill(left_out.unsqueeze(-1), float("-inf")).flatten(-2)


class DeepSeek(RotaryDecoder):
    """DeepSeek-V2 and -V3 without multi-token prediction, from token ids [B, T] to logits [B, T, vocab_size].

    Modules: as `Llama`, but `layers.N.attention` has `{wq_a, q_norm, wq_b, wkv_a, kv_norm, wkv_b, k_rope, wo}`, with
    `wq` for the first three where `q_lora_rank` is 0, and `layers.N.feed_forward`, but for the first blocks, a
    `router`, `experts` and `shared`.
    """

    def __init__(self, config: DeepSeekConfig) -> None:
        def block(index: int) -> TransformerBlock:
            feed_forward: nn.Module
            if index < config.n_dense_layers:
                feed_forward = FeedForward(config.dim, config.dense_hidden_dim, n_layers=config.n_layers)
            else:
                feed_forward = MoE(config)
            return TransformerBlock(config, feed_forward=feed_forward, attention=LatentAttention(config))

        super().__init__(config, block)
