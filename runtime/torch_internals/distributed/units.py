"""Private state of FSDP2's units."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

__all__ = ["FSDPParam", "freed_after_forward", "kept_after_forward", "summed_in_other_type", "unsharded_gradients"]


def freed_after_forward(model: nn.Module) -> list[FSDPModule] | None:
    """Return the units of a model that reshard fully after forward; None where some reshard to fewer ranks.

    The root unit of a called model is not among them, unless its plan requests it.
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


def kept_after_forward(group: FSDPParamGroup) -> list[Tensor]:
    """Return the pieces that a unit keeps of its parameters since it was resharded to fewer ranks after forward."""
    pieces = (parameter._sharded_post_forward_param_data for parameter in group.fsdp_params)
    return [piece for piece in pieces if piece is not None]


def summed_in_other_type(model: nn.Module) -> list[FSDPParam]:
    """Return the parameters of a model's units whose unsharded gradients are summed in another dtype than computed."""
    return [
        parameter
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
        for parameter in group.fsdp_params
        if group.mp_policy.reduce_dtype not in (None, group.mp_policy.param_dtype or parameter.sharded_param.dtype)
    ]


def unsharded_gradients(parameters: Iterable[FSDPParam]) -> list[tuple[object, str]]:
    """Return pairs of an object and its attribute for an unsharded gradient: as computed, and the sum.

    The parameters must have been gathered before.
    """
    return [
        place
        for parameter in parameters
        for place in ((parameter._unsharded_param, "grad"), (parameter, "unsharded_accumulated_grad"))
    ]
