"""Context-parallel attention: attention over a sequence that is sharded over ranks.

Every rank of a context-parallel axis has the queries, keys and values of some tokens. Either ranks exchange heads for
tokens (:mod:`legoai.runtime.attention.by_heads`), or keys and values are communicated and queries stay: attention to
each block of keys is computed separately, and the results are merged by their log-sum-exp (Liu et al. 2023, "Ring
Attention with Blockwise Transformers for Near-Infinite Context"; the backward pass as in Dao 2023, "FlashAttention-2",
section 3.1.2, with the merged sums).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from legoai.runtime.attention.blocks import Balance, Block, gathered_blocks, ring_blocks
from legoai.runtime.attention.by_heads import attend_by_heads
from legoai.runtime.attention.kernels import Inputs, Kernel, choose_kernel
from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.torch_internals.compiler.dynamo import allow_function_modes_in_checkpoints
from legoai.runtime.torch_internals.distributed import collectives
from legoai.specs.models.layers import exact_dtype
from legoai.specs.models.manifests.attention_call import AttentionCall

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

Rotate = Literal["allgather", "alltoall", "heads"]


def context_parallel_attention(module: nn.Module, mesh: DeviceMesh, *, rotate: Rotate, balance: Balance) -> None:
    """Let a module's scaled dot-product attention cover the tokens of all ranks of a mesh.

    In its forward, every `torch.nn.functional.scaled_dot_product_attention` uses this rank's tokens as queries, and
    those of all ranks as keys and values. A causal mask follows the tokens' positions in the sequence. Code outside the
    module is not affected.

    Args:
        module: calls `scaled_dot_product_attention` in its forward, on tensors [batch, heads, tokens, head_dim] whose
            tokens are those of `local_positions`, without mask (but `is_causal`) and without dropout.
        mesh: of one axis.
        rotate: `allgather` gathers all keys and values at once, in the backward pass again; `alltoall` passes them
            around the ring of ranks, which needs memory for two pieces only and overlaps with computation; `heads`
            exchanges heads for tokens before attention, and tokens for heads after it.
        balance: which tokens each rank holds.

    Raises:
        RunError: at the call, where the module calls attention in an unsupported way.
    """
    if mesh.size() == 1:
        return
    pieces = _Pieces(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size(), rotate, balance)
    forward = module.forward

    def forward_over_ranks(*args: Any, **kwargs: Any) -> Any:
        products = _ScaledDotProducts(pieces)
        allow_function_modes_in_checkpoints()
        with products:
            result = forward(*args, **kwargs)
        if not products.seen:
            raise RunError(
                RunErrorCode.ATTENTION,
                f"{type(module).__name__} did not call scaled_dot_product_attention, so it would see its own rank's "
                "tokens only",
                help="call torch.nn.functional.scaled_dot_product_attention in its forward, or leave out `context`",
            )
        return result

    module.forward = forward_over_ranks


class _ScaledDotProducts(TorchFunctionMode):
    """While active, scaled dot-product attention is over all ranks."""

    def __init__(self, pieces: _Pieces) -> None:
        super().__init__()
        self.pieces = pieces
        self.seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            self.seen = True
            return _scaled_dot_product(self.pieces, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _scaled_dot_product(  # noqa: PLR0917 (PyTorch's own signature)
    pieces: _Pieces,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` with the tokens of all ranks as keys and values."""
    call = AttentionCall(tuple(query.shape), tuple(key.shape), attn_mask is not None, dropout_p > 0, enable_gqa)
    misfit = call.misfit()
    if misfit is not None:
        raise RunError(
            RunErrorCode.ATTENTION,
            f"scaled_dot_product_attention with {misfit.given} cannot be computed over the pieces of a sequence",
            help=f"{misfit.help}; or leave out `context`",
        )
    if isinstance(query, DTensor):
        q, k, v = (_of_heads(query, item) for item in (query, key, value))
        result = _scaled_dot_product(pieces, q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        return DTensor.from_local(result, query.device_mesh, query.placements, run_check=False)
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (item.to(dtype) for item in (query, key, value))
    if pieces.rotate == "heads":
        return attend_by_heads(
            query, key, value, pieces.group, pieces.size, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    way = _Way(pieces, choose_kernel(query, value), is_causal, scale)
    result = _Attention.apply(query, key, value, way)  # type: ignore[no-untyped-call]
    assert isinstance(result, torch.Tensor)
    return result


def _of_heads(query: DTensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of queries, keys or values that are sharded alike, by samples or heads."""
    alike = isinstance(tensor, DTensor) and (query.device_mesh, query.placements) == (
        tensor.device_mesh,
        tensor.placements,
    )
    if not alike or not all(item.is_replicate() or item.is_shard(0) or item.is_shard(1) for item in query.placements):
        laid = getattr(tensor, "placements", "those of a plain tensor")
        raise RunError(
            RunErrorCode.ATTENTION,
            f"queries with the placements {query.placements} and keys or values with {laid} cannot attend to pieces of "
            "a sequence: samples or heads may be sharded, and those of all three alike",
        )
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


@dataclass(frozen=True, slots=True)
class _Way:
    """Attention of one call."""

    pieces: _Pieces
    kernel: Kernel
    causal: bool
    scale: float

    def inputs(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Block) -> Inputs:
        rows, columns = block.queries, block.keys
        return Inputs(query[:, :, rows], key[:, :, columns], value[:, :, columns], block.causal, self.scale)


class _Attention(torch.autograd.Function):
    """Queries of this rank, keys and values of all."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, way: _Way) -> torch.Tensor:
        merged = _Merged(query, value)

        def attend(keys: torch.Tensor, values: torch.Tensor, blocks: list[Block]) -> None:
            for block in blocks:
                merged.add(block.queries, *way.kernel.forward(way.inputs(query, keys, values, block)))

        way.pieces.travel(key, value, way.causal, attend)
        out = merged.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, merged.log_sum)
        ctx.way = way
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, log_sum = ctx.saved_tensors
        way: _Way = ctx.way
        grad_query = torch.zeros_like(query, dtype=exact_dtype(query))

        def attend(keys: torch.Tensor, values: torch.Tensor, blocks: list[Block]) -> tuple[torch.Tensor, torch.Tensor]:
            grad_keys = torch.zeros_like(keys, dtype=grad_query.dtype)
            grad_values = torch.zeros_like(values, dtype=grad_query.dtype)
            for block in blocks:
                of_rows = (item[:, :, block.queries].contiguous() for item in (grad, out, log_sum))
                part = way.kernel.backward(way.inputs(query, keys, values, block), *of_rows)
                grad_query[:, :, block.queries] += part[0]
                grad_keys[:, :, block.keys] += part[1]
                grad_values[:, :, block.keys] += part[2]
            return grad_keys, grad_values

        grad_key, grad_value = way.pieces.travel_back(key, value, way.causal, attend)
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None


class _Merged:
    """Attention to all keys so far.

    With `a` and `b` the results for two sets of keys, and `la` and `lb` the logarithms of their softmax sums, the
    result for both is `a exp(la - l) + b exp(lb - l)`, where `l = log(exp la + exp lb)`.
    """

    def __init__(self, query: torch.Tensor, value: torch.Tensor) -> None:
        dtype = exact_dtype(query)
        self.out = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=dtype)
        self.log_sum = query.new_full(query.shape[:-1], float("-inf"), dtype=dtype)

    def add(self, rows: slice, out: torch.Tensor, log_sum: torch.Tensor) -> None:
        """Merge in keys with results `out` [batch, heads, rows, head_dim] and `log_sum` [batch, heads, rows]."""
        before = self.log_sum[:, :, rows]
        after = torch.logaddexp(before, log_sum)
        kept = (before - after).exp_().unsqueeze(-1)
        self.out[:, :, rows] = self.out[:, :, rows] * kept + out * (log_sum - after).exp_().unsqueeze(-1)
        self.log_sum[:, :, rows] = after


Attend = Callable[[torch.Tensor, torch.Tensor, list[Block]], None]
AttendBack = Callable[[torch.Tensor, torch.Tensor, list[Block]], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Distribution of a sequence over the ranks of a group, and the communication of keys and values."""

    group: GroupName
    rank: int
    size: int
    rotate: Rotate
    balance: Balance

    def travel(self, key: torch.Tensor, value: torch.Tensor, causal: bool, attend: Attend) -> None:
        """Bring the keys and values of all ranks to this one, and attend to them."""
        if self.rotate == "allgather":
            attend(*self._gather(key, value), self._gathered_blocks(key, causal))
            return
        held = torch.cat((key.flatten(), value.flatten()))
        for step in range(self.size):
            coming = self._pass_on(held) if step < self.size - 1 else held
            attend(*_unpack(held, key, value), self._ring_blocks(key, causal, step))
            held = _wait(coming)

    def travel_back(
        self, key: torch.Tensor, value: torch.Tensor, causal: bool, attend: AttendBack
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bring keys and values as `travel` does, and bring the gradients of each to the rank that it came from."""
        if self.rotate == "allgather":
            grads = attend(*self._gather(key, value), self._gathered_blocks(key, causal))
            return self._scatter(*grads)
        held = torch.cat((key.flatten(), value.flatten()))
        grads_coming: torch.Tensor | None = None
        for step in range(self.size):
            coming = self._pass_on(held) if step < self.size - 1 else held
            grads = attend(*_unpack(held, key, value), self._ring_blocks(key, causal, step))
            grad = torch.cat([item.flatten() for item in grads])
            if grads_coming is not None:
                grad += _wait(grads_coming)
            grads_coming = self._pass_on(grad)
            held = _wait(coming)
        assert grads_coming is not None
        return _unpack(_wait(grads_coming), key, value)

    def _gathered_blocks(self, key: torch.Tensor, causal: bool) -> list[Block]:
        return gathered_blocks(rank=self.rank, size=self.size, length=key.shape[2], causal=causal, balance=self.balance)

    def _ring_blocks(self, key: torch.Tensor, causal: bool, step: int) -> list[Block]:
        source = (self.rank - step) % self.size
        return ring_blocks(rank=self.rank, source=source, length=key.shape[2], causal=causal, balance=self.balance)

    def _pass_on(self, flat: torch.Tensor) -> torch.Tensor:
        """Send to the next rank, and receive as much from the one before: [n] to [n]."""
        sent, received = [0] * self.size, [0] * self.size
        sent[(self.rank + 1) % self.size] = received[(self.rank - 1) % self.size] = flat.numel()
        return collectives.all_to_all_single(flat, received, sent, self.group)

    def _gather(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of all ranks in the order of the sequence, in one collective."""
        flat = torch.cat((key.flatten(), value.flatten()))
        ranks = _wait(collectives.all_gather_single(flat, 0, self.group)).view(self.size, -1)
        keys, values = torch.split(ranks, [key.numel(), value.numel()], dim=1)
        return self._in_order(keys.reshape(-1, *key.shape)), self._in_order(values.reshape(-1, *value.shape))

    def _scatter(self, grad_keys: torch.Tensor, grad_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Undo `_gather`: add the gradients of all ranks, and return those of this rank's tokens."""
        keys, values = self._by_rank(grad_keys), self._by_rank(grad_values)
        flat = torch.cat((keys.flatten(1), values.flatten(1)), dim=1).flatten()
        return _unpack(_wait(collectives.reduce_scatter_single(flat, "sum", 0, self.group)), keys[0], values[0])

    def _in_order(self, ranks: torch.Tensor) -> torch.Tensor:
        """From [ranks, batch, heads, tokens of one, dim] to [batch, heads, tokens of all, dim]."""
        if self.balance == "head_tail":
            head, tail = ranks.chunk(2, dim=3)
            ranks = torch.cat((head, tail.flip(0)))
        return ranks.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _by_rank(self, sequence: torch.Tensor) -> torch.Tensor:
        """The inverse of `_in_order`."""
        pieces = 2 * self.size if self.balance == "head_tail" else self.size
        ranks = torch.stack(sequence.chunk(pieces, dim=2))
        if self.balance == "none":
            return ranks
        head, tail = ranks.chunk(2)
        return torch.cat((head, tail.flip(0)), dim=3)


def _wait(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for a collective that was started."""
    return tensor.wait() if isinstance(tensor, collectives.AsyncCollectiveTensor) else tensor


def _unpack(flat: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a buffer into views with the shapes of keys and values."""
    keys, values = torch.split(flat, [key.numel(), value.numel()])
    return keys.view(key.shape), values.view(value.shape)
