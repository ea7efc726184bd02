"""Private state of FSDP2's units."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def freed_after_forward(model: nn.Module) -> list[FSDPModule] | None:
    """Return the units of a model whose parameters are freed after their forward; None where some keep a part of them.

    The root of a model that was called is none of them, if its plan did not say so.
    """
    found: list[FSDPModule] = []
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        groups = module._get_fsdp_state()._fsdp_param_groups
        if any(group._use_post_forward_mesh for group in groups):
            return None
        if any(group._reshard_after_forward for group in groups):
            found.append(module)
    return found
