"""Expert parallelism: the exchange of tokens with experts on other ranks, and the capacity of an expert.

A module of experts is called with rows sorted by expert and the number of rows of each expert, or as the experts of
`transformers`: with tokens, the experts of each and their weights. Its parameters have one slice for each expert along
dim 0.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from legoai.runtime.torch_internals.distributed import collectives

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

Experts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Rows sorted by expert, [rows, dim], and the number of rows of each expert, int64 [experts], to [rows, dim]."""


class ExpertParallel(ParallelStyle):
    """Puts different experts on different ranks of a mesh of one axis.

    Parameters become DTensors that are sharded on dim 0. In forward, the rows of all ranks travel to the ranks that
    hold their experts by an all-to-all, and the results travel back by another.

    Each rank of the mesh computes the loss of its own rows, and an expert's gradient comes from the rows of all of
    them. So it is divided by their number to be a mean over these ranks, like over those on which the same experts are
    replicated or fully sharded. Of ranks that compute one loss together, each of rows from its piece of the sequence,
    the gradients are a sum.

    Args:
        pieces: ranks of the mesh that compute one loss together; divides their number.
        routed: whether the module is called like the experts of `transformers`; see `take_routed_tokens`.
        capacity_factor: rows for one expert, of those that one rank sends in one call, relative to their mean; see
            `limit_capacity`. None drops nothing.
    """

    def __init__(self, *, pieces: int = 1, routed: bool = False, capacity_factor: float | None = None) -> None:
        super().__init__()
        self.pieces = pieces
        self.routed = routed
        self.capacity_factor = capacity_factor

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in module.named_parameters(recurse=False):
            placed = distribute_tensor(parameter, device_mesh, (Shard(0),))
            module.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))
        group, size = device_mesh.get_group().group_name, device_mesh.size()
        losses = size // self.pieces
        if self.routed:
            give_rows(module, ranks=size)
        forward: Experts = module.forward

        def local_experts(rows: torch.Tensor, rows_per_expert: torch.Tensor) -> torch.Tensor:
            with _local_parameters(module, ranks=losses):
                return forward(rows, rows_per_expert)

        def distributed_experts(rows: torch.Tensor, rows_per_expert: torch.Tensor) -> torch.Tensor:
            return _dispatch(local_experts, rows, rows_per_expert, group, size)

        module.forward = _uncompiled(distributed_experts)
        if self.capacity_factor is not None:
            limit_capacity(module, capacity_factor=self.capacity_factor)
        if self.routed:
            take_routed_tokens(module, ranks=size)
        return module


def give_rows(module: nn.Module, *, ranks: int = 1) -> None:
    """Let experts of `transformers` accept rows and row counts per expert, for the experts of one rank only.

    Args:
        module: whose forward accepts tokens, their experts and the weights of these, and which has its number of
            experts as `num_experts`.
        ranks: among which the experts are divided.
    """
    forward = module.forward
    experts: Any = module
    experts.num_experts //= ranks

    def of_rows(rows: torch.Tensor, rows_per_expert: torch.Tensor) -> torch.Tensor:
        expert = torch.arange(len(rows_per_expert), device=rows.device)
        chosen = expert.repeat_interleave(rows_per_expert, output_size=len(rows)).unsqueeze(1)
        result: torch.Tensor = forward(rows, chosen, rows.new_ones(len(rows), 1))
        return result

    module.forward = of_rows


def take_routed_tokens(module: nn.Module, *, ranks: int = 1) -> None:
    """Let a module that accepts rows and row counts per expert be called like the experts of `transformers`.

    Args:
        module: of experts, whose `num_experts` are those of one rank.
        ranks: among which the experts are divided.
    """
    forward: Experts = module.forward
    own: Any = module
    experts = own.num_experts * ranks

    def routed(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        choices, chosen = top_k_index.shape[-1], top_k_index.flatten()
        order = chosen.argsort(stable=True)
        rows_per_expert = torch.nn.functional.one_hot(chosen, experts).sum(0)
        results = forward(hidden_states[order // choices], rows_per_expert)
        per_choice = results[order.argsort()].view(*top_k_index.shape, -1)
        return (per_choice * top_k_weights.unsqueeze(-1)).sum(-2).to(hidden_states.dtype)

    module.forward = _uncompiled(routed)


def limit_capacity(module: nn.Module, *, capacity_factor: float) -> None:
    """Limit the rows of one call for each expert, and drop the rest.

    Of `n` rows for `e` experts, the first `ceil(capacity_factor * n / e)` of each expert are kept, in order: by
    position, where the caller sorts stably. The result of a dropped row is zero, so that its token continues on the
    residual stream only. `n` counts the rows of one rank in one call, as in Lepikhin et al. 2020, "GShard", section
    2.2, where each group of tokens has a capacity of its own.

    Args:
        module: of experts.
        capacity_factor: above 0.
    """
    forward: Experts = module.forward

    def limited(rows: torch.Tensor, rows_per_expert: torch.Tensor) -> torch.Tensor:
        capacity = math.ceil(capacity_factor * rows.shape[0] / len(rows_per_expert))
        first = rows_per_expert.cumsum(0) - rows_per_expert
        place = torch.arange(len(rows), device=rows.device) - first.repeat_interleave(
            rows_per_expert, output_size=len(rows)
        )
        kept = rows_with_room(place, capacity, len(rows_per_expert))
        results = forward(rows[kept], rows_per_expert.clamp(max=capacity))
        return results.new_zeros(len(rows), *results.shape[1:]).index_copy(0, kept, results)

    module.forward = _uncompiled(limited)


def _uncompiled(experts: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Disable the compiler, which would recompile for each number of rows."""
    vars(experts)[_UNCOMPILED] = True  # which the wrapper copies
    return torch.compiler.disable(experts)  # type: ignore[no-any-return, no-untyped-call]


_UNCOMPILED: Final = "legoai_uncompiled"


def runs_uncompiled(module: nn.Module) -> bool:
    """Whether a module is experts whose forward breaks every graph: those on several ranks, or with a capacity."""
    return hasattr(module.forward, _UNCOMPILED)


def _dispatch(
    experts: Experts, rows: torch.Tensor, rows_per_expert: torch.Tensor, group: GroupName, size: int
) -> torch.Tensor:
    """Send rows to the ranks of their experts, and bring the results back to where the rows were.

    Args:
        experts: those of this rank.
        rows: of this rank, sorted by expert, [rows, dim].
        rows_per_expert: for all experts, int64 [experts].
        group: of the ranks among which the experts are divided.
        size: their number.
    """
    if size == 1:
        return experts(rows, rows_per_expert)
    arriving = _wait(collectives.all_to_all_single(rows_per_expert, None, None, group)).view(size, -1)
    counts = torch.stack((rows_per_expert.view(size, -1).sum(1), arriving.sum(1)))
    sent, received = rows_exchanged(counts, rows.shape[0])
    held = _wait(collectives.all_to_all_single(rows.contiguous(), received, sent, group))
    by_expert = _order_by_expert(arriving, held.shape[0])
    results = experts(held[by_expert], arriving.sum(0))
    in_order_of_arrival = results[by_expert.argsort()]
    return _wait(collectives.all_to_all_single(in_order_of_arrival, sent, received, group))


def rows_exchanged(counts: torch.Tensor, rows: int) -> list[list[int]]:
    """Copy to the host how many rows go to each rank, and how many come from each.

    The last rank's count is the remainder, so that the sum is known even where a tracer has only symbols for sizes.

    Args:
        counts: int64 [2, ranks].
        rows: of this rank, the sum of the first half.
    """
    (*sent, _), received = counts.cpu().tolist()  # one copy, even where a tracer reads each element
    return [[*sent, rows - sum(sent)], received]


def rows_with_room(place: torch.Tensor, capacity: int, experts: int) -> torch.Tensor:
    """Return the indices of rows whose index among those of the same expert is below its capacity.

    Args:
        place: int64 [rows].
        capacity: of each expert.
        experts: their number.

    Returns:
        int64 [rows that are kept].
    """
    return (place < capacity).nonzero().squeeze(1)


def _order_by_expert(arriving: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the order that sorts rows, which came sorted by rank and then by expert, by expert and then by rank.

    Args:
        arriving: rows from each rank for each expert, int64 [ranks, experts].
        rows: their sum.

    Returns:
        int64 [rows].
    """
    ranks, experts = arriving.shape
    expert = torch.arange(experts, device=arriving.device).repeat(ranks)
    return expert.repeat_interleave(arriving.flatten(), output_size=rows).argsort(stable=True)


def _wait(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for a collective, so that its result has a gradient."""
    if not isinstance(tensor, collectives.AsyncCollectiveTensor):
        return tensor
    return collectives.wait_tensor(tensor)  # type: ignore[no-untyped-call, no-any-return]


@contextlib.contextmanager
def _local_parameters(module: nn.Module, *, ranks: int) -> Iterator[None]:
    """Expose the local parts of a module's DTensor parameters, with gradients averaged over `ranks`."""
    whole = dict(module._parameters)
    local: dict[str, Any] = {}
    for name in whole:
        parameter = getattr(module, name)  # which a unit of a traced step gathers
        if isinstance(parameter, DTensor):
            parameter = _Mean.apply(parameter.to_local(), ranks)  # type: ignore[no-untyped-call]
        local[name] = parameter
    module._parameters.update(local)
    try:
        yield
    finally:
        module._parameters.update(whole)


class _Mean(torch.autograd.Function):
    """The tensor itself; its gradient is divided by a number of ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad / ctx.ranks, None
