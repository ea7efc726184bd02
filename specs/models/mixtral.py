"""Mixtral, a sparse mixture of experts, as one device would run it."""

# mypy: no-warn-return-any
from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from legoai.specs.models.configs import DeepSeekConfig, MixtralConfig
from legoai.specs.models.decoder import Attention, RotaryDecoder, TransformerBlock
from legoai.specs.models.layers import INIT_STD, Linear, exact_dtype, residual_std


class Experts(nn.Module):
    """The SwiGLU experts of one block, their weights stacked along dim 0.

    `w1` and `w3` are [n_experts, hidden_dim, dim], `w2` is [n_experts, dim, hidden_dim].
    """

    def __init__(self, config: MixtralConfig | DeepSeekConfig) -> None:
        super().__init__()
        self.n_experts = config.n_experts
        self.residual_std = residual_std(config.n_layers)
        self.w1 = nn.Parameter(torch.empty(config.n_experts, config.hidden_dim, config.dim))
        self.w2 = nn.Parameter(torch.empty(config.n_experts, config.dim, config.hidden_dim))
        self.w3 = nn.Parameter(torch.empty(config.n_experts, config.hidden_dim, config.dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all weights in place."""
        nn.init.normal_(self.w1, std=INIT_STD)
        nn.init.normal_(self.w2, std=self.residual_std)
        nn.init.normal_(self.w3, std=INIT_STD)

    def forward(self, x: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """Send each row through its expert.

        Args:
            x: rows sorted by expert, [rows, dim].
            tokens_per_expert: number of rows for each expert, int64 [n_experts], with sum `rows`.

        Returns:
            [rows, dim], in the order of `x`.
        """
        gate = F.silu(grouped_linear(x, self.w1, tokens_per_expert))
        return grouped_linear(gate * grouped_linear(x, self.w3, tokens_per_expert), self.w2, tokens_per_expert)


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, group_sizes: torch.Tensor) -> torch.Tensor:
    """Multiply consecutive groups of rows by a matrix each.

    Args:
        x: [rows, in_features].
        weight: [groups, out_features, in_features].
        group_sizes: rows of each group, int64 [groups].

    Returns:
        [rows, out_features]: in bf16 one grouped kernel, otherwise one product per group.
    """
    # Autocast supports products of two matrices, but not grouped ones; and a device such as meta has none.
    if torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    if x.dtype == torch.bfloat16:
        ends = group_sizes.cumsum(0).to(torch.int32)
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    parts = torch.split(x, rows_of_groups(group_sizes, x.shape[0]))
    return torch.cat([F.linear(part, matrix) for part, matrix in zip(parts, weight.unbind(), strict=True)])


def rows_of_groups(group_sizes: torch.Tensor, rows: int) -> list[int]:
    """Copy the sizes of groups, int64 [groups], to the host; their sum is `rows`.

    The last is the remainder, so that the sum is known even where a tracer has only symbols for the sizes.
    """
    *sizes, _ = group_sizes.cpu().tolist()  # one copy, even where a tracer reads each element
    return [*sizes, rows - sum(sizes)]


class MoE(nn.Module):
    """A feed-forward in which every token visits its `top_k` best experts (Shazeer et al. 2017; no token is dropped).

    The router's probabilities of the chosen experts, scaled to sum to one, weigh their outputs.
    """

    def __init__(self, config: MixtralConfig | DeepSeekConfig) -> None:
        super().__init__()
        self.n_experts = config.n_experts
        self.top_k = config.top_k
        self.router = Linear(config.dim, config.n_experts, bias=False)
        self.experts = Experts(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform each position by itself: [B, T, dim] to [B, T, dim]."""
        rows = x.flatten(0, -2)
        weights, chosen = self.choose(self.router(rows))
        weights = weights.type_as(x)

        order = chosen.flatten().argsort(stable=True)
        tokens_per_expert = F.one_hot(chosen.flatten(), self.n_experts).sum(0)
        outputs = self.experts(rows[order // self.top_k], tokens_per_expert)

        per_choice = outputs[order.argsort()].view(*weights.shape, -1)
        return (per_choice * weights.unsqueeze(-1)).sum(-2).view_as(x)

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights of each row's experts, [rows, top_k], and their numbers, by the router's logits."""
        weights, chosen = logits.softmax(-1, dtype=exact_dtype(logits)).topk(self.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen


class Mixtral(RotaryDecoder):
    """Mixtral (Jiang et al. 2024), from token ids [B, T] to logits [B, T, vocab_size].

    Modules: as `Llama`, but `layers.N.feed_forward` has a `router` and `experts`.
    """

    def __init__(self, config: MixtralConfig) -> None:
        def block(index: int) -> TransformerBlock:
            return TransformerBlock(config, feed_forward=MoE(config), attention=Attention(config))

        super().__init__(config, block)
