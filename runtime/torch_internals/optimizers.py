"""Private functions of torch's optimizers.

Each name is here without its underscore, with the reason why no public one serves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

# `torch.optim.Muon` calls them on the parameters themselves, of which a rank may hold a shard.
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

__all__ = ["muon_rate", "orthogonalized"]

muon_rate: Final[Callable[[float, str | None, torch.Size], float]] = _adjust_lr
"""The learning rate of a matrix of some shape, from that of all."""

orthogonalized: Final[Callable[[torch.Tensor, tuple[float, float, float], int, float], torch.Tensor]] = (
    _zeropower_via_newtonschulz
)
"""A matrix after so many Newton-Schulz steps with these coefficients, in bf16."""
