"""Linear and embedding layers that draw their first weights as transformers do, and the dtype of exact sums."""

from __future__ import annotations

import math

import torch
from torch import nn

INIT_STD = 0.02
"""Standard deviation of first weights (Radford et al. 2019)."""


def residual_std(n_layers: int) -> float:
    """Return the standard deviation for a layer that writes to the residual stream.

    Each block adds two such outputs to the stream, so `1 / sqrt(2 n_layers)` keeps the stream's variance from growing
    with depth (Radford et al. 2019, section 2.3).
    """
    return INIT_STD / math.sqrt(2 * n_layers)


def exact_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of scores, and of sums of many parts: at least fp32."""
    return torch.promote_types(tensor.dtype, torch.float32)


class Linear(nn.Linear):
    """`torch.nn.Linear` with weights from a normal distribution and a bias of zero."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, init_std: float = INIT_STD) -> None:
        self.init_std = init_std
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Initialise the weight in place."""
        nn.init.normal_(self.weight, std=self.init_std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """`torch.nn.Embedding` with weights from a narrow normal distribution, fit to be tied to an output layer."""

    def reset_parameters(self) -> None:
        """Initialise the weight in place."""
        nn.init.normal_(self.weight, std=INIT_STD)
