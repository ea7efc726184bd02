"""Attention over pieces of a sequence is attention over the whole of it, forward and backward."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from legoai.runtime import RunError
from legoai.runtime.attention.blocks import gathered_blocks, ring_blocks
from legoai.runtime.attention.context import Block as Pairs
from legoai.runtime.attention.context import context_parallel_attention
from legoai.runtime.attention.kernel_choice import choice_of_pytorch
from legoai.runtime.attention.kernels import (
    CpuFlashKernel,
    CudnnKernel,
    FlashKernel,
    Inputs,
    Kernel,
    MathKernel,
    Padded,
    choose_kernel,
)
from legoai.runtime.attention.positions import check_takes_positions, local_positions
from support.marks import some_slow

ROTATIONS = ("allgather", "alltoall")
BALANCES = ("head_tail", "none")


def positions(size: int, length: int, balance: str) -> list[torch.Tensor]:
    return [local_positions(rank=rank, size=size, length=length, balance=balance) for rank in range(size)]


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_positions_partition_the_sequence_in_order(balance: str, size: int):
    parts = positions(size, 24, balance)
    assert torch.cat(parts).sort().values.tolist() == list(range(24))
    assert all(part.tolist() == sorted(part.tolist()) and len(part) == 24 // size for part in parts)


def test_head_tail_balances_query_key_pairs():
    pairs = {int((part + 1).sum()) for part in positions(4, 32, "head_tail")}
    assert len(pairs) == 1
    assert len({int((part + 1).sum()) for part in positions(4, 32, "none")}) == 4


def test_undivisible_sequence_is_refused():
    with pytest.raises(ValueError, match="12 tokens cannot be cut into 8 equal pieces"):
        local_positions(rank=0, size=4, length=12, balance="head_tail")


def add_pairs(count: torch.Tensor, blocks: list[Pairs], queries: torch.Tensor, keys: torch.Tensor) -> None:
    """Count how often each pair of query and key, by their places in the sequence, is computed."""
    for block in blocks:
        rows, columns = queries[block.queries], keys[block.keys]
        part = torch.ones(len(rows), len(columns), dtype=torch.int64)
        count[rows[:, None], columns] += part.tril() if block.causal else part


@pytest.mark.parametrize(("size", "balance", "causal"), [*itertools.product((2, 3, 4), BALANCES, (True, False))])
def test_blocks_cover_every_unmasked_pair_exactly_once(size: int, balance: str, causal: bool):
    length = 24
    parts = positions(size, length, balance)
    for rank, mine in enumerate(parts):
        expected = torch.zeros(length, length, dtype=torch.int64)
        expected[mine] = torch.ones(length, length, dtype=torch.int64).tril()[mine] if causal else 1
        options = {"rank": rank, "length": len(mine), "causal": causal, "balance": balance}
        at_once, around = torch.zeros_like(expected), torch.zeros_like(expected)
        add_pairs(at_once, gathered_blocks(size=size, **options), mine, torch.arange(length))
        for source, theirs in enumerate(parts):
            add_pairs(around, ring_blocks(source=source, **options), mine, theirs)
        assert torch.equal(at_once, expected)
        assert torch.equal(around, expected)


def tensors(*, heads: int, key_heads: int, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, count, length, 8) for count in (heads, key_heads, key_heads, heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_kernel_gradients_equal_autograd(causal: bool, key_heads: int):
    q, k, v, grad = tensors(heads=4, key_heads=key_heads, length=12, dtype=torch.float64)
    leaves = [item.clone().requires_grad_() for item in (q, k, v)]
    whole = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
    whole.backward(grad)
    for kernel in (CpuFlashKernel(), MathKernel()):
        assert_as_autograd(kernel, Inputs(q, k, v, causal, 8**-0.5), grad, whole, leaves)


def assert_as_autograd(kernel: Kernel, inputs: Inputs, grad: torch.Tensor, whole: torch.Tensor, leaves: list) -> None:
    out, log_sum = kernel.forward(inputs)
    grads = kernel.backward(inputs, grad, out, log_sum)
    torch.testing.assert_close(out, whole.detach(), rtol=0, atol=1e-13)
    for mine, leaf in zip(grads, leaves, strict=True):
        torch.testing.assert_close(mine, leaf.grad, rtol=0, atol=1e-13)


@pytest.mark.parametrize("key_heads", [4, 2])
def test_values_of_fewer_features_are_padded_for_flash(key_heads: int):
    q, k, v, grad = tensors(heads=4, key_heads=key_heads, length=12, dtype=torch.float64)
    v, grad = v[..., :6], grad[..., :6]
    leaves = [item.clone().requires_grad_() for item in (q, k, v)]
    whole = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True, scale=0.3)
    whole.backward(grad)
    kernel = choose_kernel(q, v)
    assert isinstance(kernel, Padded) and isinstance(kernel.kernel, CpuFlashKernel)
    assert_as_autograd(kernel, Inputs(q, k, v, True, 0.3), grad, whole, leaves)


def test_heads_are_padded_to_a_width_that_the_kernel_takes():
    q, k, v, grad = tensors(heads=4, key_heads=2, length=12, dtype=torch.float64)
    leaves = [item.clone().requires_grad_() for item in (q, k, v)]
    whole = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True, scale=0.3)
    whole.backward(grad)
    assert_as_autograd(Padded(CpuFlashKernel(), 11), Inputs(q, k, v, True, 0.3), grad, whole, leaves)
    # As PyTorch's own attention does, FlashAttention-2 takes multiples of 8 features, on an accelerator alone.
    for width, of_values, padded in ((100, 100, 104), (100, 52, 104), (64, 48, 64)):
        query = torch.empty(1, 2, 8, width, device="meta", dtype=torch.bfloat16)
        kernel = choose_kernel(query, query[..., :of_values])
        assert isinstance(kernel, Padded) and isinstance(kernel.kernel, FlashKernel) and kernel.width == padded
        inputs = Inputs(query, query, query[..., :of_values], True, 0.1)
        out, log_sum = kernel.forward(inputs)
        assert out.shape == inputs.value.shape
        assert [grad.shape for grad in kernel.backward(inputs, out, out, log_sum)] == [
            item.shape for item in inputs[:3]
        ]


def cudnn_forward(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale
):
    assert attn_bias is None and compute_log_sumexp and not dropout_p
    out, log_sum = MathKernel().forward(Inputs(query, key, value, is_causal, scale))
    empty = query.new_empty(0)
    seed = torch.zeros((), dtype=torch.int64)
    return out, log_sum.unsqueeze(-1), empty, empty, query.shape[2], key.shape[2], seed, seed.clone(), empty


def cudnn_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    philox_seed,
    philox_offset,
    attn_bias,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    *,
    scale,
):
    assert (max_q, max_k, dropout_p) == (query.shape[2], key.shape[2], 0.0)
    assert logsumexp.shape == (*out.shape[:-1], 1)
    assert not philox_seed.shape and not philox_offset.shape and philox_seed.dtype == torch.int64
    return MathKernel().backward(Inputs(query, key, value, is_causal, scale), grad_out, out, logsumexp.squeeze(-1))


@pytest.mark.parametrize("causal", [True, False])
def test_operators_of_cudnn_are_called_as_pytorch_declares_them(causal: bool):
    # The shapes are those of `torch._meta_registrations`; matrix products stand in for the kernels, which no CPU has.
    library = torch.library.Library("aten", "IMPL", "CPU")
    try:
        library.impl("_scaled_dot_product_cudnn_attention", cudnn_forward)
        library.impl("_scaled_dot_product_cudnn_attention_backward", cudnn_backward)
        q, k, v, grad = tensors(heads=4, key_heads=2, length=12, dtype=torch.float64)
        v, grad = v[..., :6], grad[..., :6]
        leaves = [item.clone().requires_grad_() for item in (q, k, v)]
        whole = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True, scale=0.3)
        whole.backward(grad)
        assert_as_autograd(CudnnKernel(), Inputs(q, k, v, causal, 0.3), grad, whole, leaves)
    finally:
        library._destroy()


def test_log_sum_of_cudnn_has_the_shape_that_its_backward_takes():
    query = torch.empty(2, 4, 16, 64, device="meta", dtype=torch.bfloat16)
    inputs = Inputs(query, query, query, True, 0.125)
    out, log_sum = CudnnKernel().forward(inputs)
    assert out.shape == query.shape and log_sum.shape == (2, 4, 16)
    assert [grad.shape for grad in CudnnKernel().backward(inputs, out, out, log_sum)] == [query.shape] * 3


FLASH, CUDNN, MATH = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH


@pytest.mark.parametrize(
    ("backends", "width", "of_values", "choice", "kernel"),
    [
        ([CUDNN], 64, 64, CUDNN, CudnnKernel),
        ([CUDNN], 192, 128, CUDNN, CudnnKernel),
        ([FLASH], 64, 64, None, FlashKernel),
        ([MATH], 64, 64, None, MathKernel),
        ([FLASH, CUDNN, MATH], 64, 64, FLASH, FlashKernel),
        ([FLASH, CUDNN, MATH], 64, 64, CUDNN, CudnnKernel),
        ([FLASH, CUDNN, MATH], 192, 128, SDPBackend.EFFICIENT_ATTENTION, Padded),
        ([MATH, CUDNN], 64, 64, MATH, MathKernel),
    ],
)  # fmt: skip
def test_accelerators_use_the_kernel_that_pytorch_chooses_of_the_allowed_ones(
    backends: list, width: int, of_values: int, choice: SDPBackend | None, kernel: type
):
    def choose(query, key, value, *_, **__) -> int:
        assert (query.shape[-1], value.shape[-1], query.dtype) == (width, of_values, torch.bfloat16)
        assert choice is not None, "PyTorch is not asked where cuDNN is not allowed"
        return choice.value

    library = torch.library.Library("aten", "IMPL", "Meta")
    try:
        library.impl("_fused_sdp_choice", choose)
        query = torch.empty(1, 2, 8, width, device="meta", dtype=torch.bfloat16)
        with sdpa_kernel(backends):
            assert isinstance(choose_kernel(query, query[..., :of_values]), kernel)
    finally:
        library._destroy()


@pytest.mark.slow
def test_choice_of_pytorch_is_constant_in_a_compiled_graph():
    def scaled(query: torch.Tensor) -> torch.Tensor:
        choice = choice_of_pytorch(query.device, query.dtype, query.shape[-1], query.shape[-1], query.requires_grad)
        return query * choice.value

    query = torch.ones(1, 2, 4, 8, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(scaled, backend="aot_eager", fullgraph=True)
    for backend in (FLASH, MATH):
        torch._dynamo.reset()
        with sdpa_kernel(backend):
            assert torch.equal(compiled(query), query * backend.value)
    torch._dynamo.reset()


def test_kernel_is_flash_unless_disabled():
    q, _, v, _ = tensors(heads=1, key_heads=1, length=2, dtype=torch.float32)
    assert isinstance(choose_kernel(q, v), CpuFlashKernel)
    with sdpa_kernel(SDPBackend.MATH):
        assert isinstance(choose_kernel(q, v), MathKernel)
    assert isinstance(choose_kernel(q[..., :4], v), MathKernel)
    assert isinstance(choose_kernel(q.to("meta"), v.to("meta")), MathKernel)


class Attention(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.options)


def attend(
    rotate: str, balance: str, *, causal: bool, key_heads: int = 4, dtype=torch.float64, recompute=False, math=False
):
    """Largest differences between the pieces and the whole: result and gradients of queries, keys and values."""
    size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    q, k, v, grad = tensors(heads=4, key_heads=key_heads, length=24, dtype=dtype)
    leaves = [item.double().clone().requires_grad_() for item in (q, k, v)]
    whole = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
    whole.backward(grad.double())
    mine = local_positions(rank=mesh.get_local_rank(), size=size, length=24, balance=balance)
    module = Attention(is_causal=causal, enable_gqa=True)
    context_parallel_attention(module, mesh, rotate=rotate, balance=balance)
    parts = [item[:, :, mine].clone().requires_grad_() for item in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH if math else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        out = checkpoint(module, *parts, use_reentrant=False) if recompute else module(*parts)
    out.backward(grad[:, :, mine])
    compared = [(out, whole), *((part.grad, leaf.grad) for part, leaf in zip(parts, leaves, strict=True))]
    return [float((part.double() - item[:, :, mine]).abs().max()) for part, item in compared]


@pytest.mark.parametrize(("rotate", "balance", "causal"), [*itertools.product(ROTATIONS, BALANCES, (True, False))])
def test_ring_attention_equals_full_attention(rotate: str, balance: str, causal: bool, gloo):
    for options in ({}, {"key_heads": 2}, {"recompute": True}, {"math": True, "key_heads": 1}):
        for differences in gloo(4)(attend, rotate, balance, causal=causal, **options):
            assert max(differences) < 1e-13, options


@pytest.mark.parametrize("causal", [True, False])
def test_head_exchange_equals_full_attention(causal: bool, gloo):
    for options in ({}, {"recompute": True}, {"math": True}):
        for differences in gloo(4)(attend, "heads", "none", causal=causal, **options):
            assert max(differences) < 1e-13, options
    for differences in gloo(2)(attend, "heads", "none", causal=causal, key_heads=2):
        assert max(differences) < 1e-13


@pytest.mark.parametrize("rotate", ROTATIONS)
def test_low_precision_partial_results_are_merged_in_fp32(rotate: str, gloo):
    for differences in gloo(4)(attend, rotate, "head_tail", causal=True, key_heads=2, dtype=torch.bfloat16):
        assert max(differences) < 0.03  # bf16 rounds numbers below 4 by up to 2^-7


def attend_under_tensor_parallel(rotate: str, balance: str) -> tuple[bool, float]:
    """Queries, keys and values as DTensors that are sharded by heads on another axis."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    q, k, v, _ = tensors(heads=4, key_heads=4, length=24, dtype=torch.float64)
    mine = local_positions(rank=mesh.get_local_rank("cp"), size=2, length=24, balance=balance)
    module = Attention(is_causal=True)
    context_parallel_attention(module, mesh["cp"], rotate=rotate, balance=balance)
    out = module(*(distribute_tensor(item[:, :, mine], mesh["tp"], (Shard(1),)) for item in (q, k, v)))
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return isinstance(out, DTensor), float((out.full_tensor() - whole[:, :, mine]).abs().max())


@pytest.mark.parametrize(("rotate", "balance"), [("allgather", "head_tail"), ("heads", "none")])
def test_heads_sharded_on_another_axis_stay_sharded(rotate: str, balance: str, gloo):
    for sharded, difference in gloo(4)(attend_under_tensor_parallel, rotate, balance):
        assert sharded
        assert difference < 1e-13


class Block(nn.Module):
    """Attention in another module, as in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(is_causal=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, 2 * x, 3 * x)


def compiled(rotate: str) -> bool:
    """Whether one graph without breaks equals the module bitwise."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    block = Block()
    balance = "none" if rotate == "heads" else "head_tail"
    context_parallel_attention(block.attention, mesh, rotate=rotate, balance=balance)
    x = torch.randn(1, 2, 8, 4)
    results = []
    for function in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        result = function(leaf)
        results.append((result.detach(), *torch.autograd.grad(result.sum(), leaf)))
    torch._dynamo.reset()
    return all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("rotate", some_slow(("allgather", "alltoall", "heads"), "allgather", "alltoall"))
def test_compiled_block_attends_over_all_ranks(rotate: str, gloo):
    assert gloo(2)(compiled, rotate) == [True, True]


def compiled_in_a_checkpoint(rotate: str, selective: bool) -> bool:
    """Whether a compiled checkpoint of a block equals the block bitwise, as one graph without breaks."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    block = Block()
    balance = "none" if rotate == "heads" else "head_tail"
    context_parallel_attention(block.attention, mesh, rotate=rotate, balance=balance)
    policy = {"context_fn": _saving_products} if selective else {}
    wrapped = checkpoint_wrapper(block, preserve_rng_state=False, **policy)
    x = torch.randn(1, 2, 8, 4)
    results = []
    for function in (block, torch.compile(wrapped, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        result = function(leaf)
        results.append((result.detach(), *torch.autograd.grad(result.square().sum(), leaf)))
    torch._dynamo.reset()
    return all(torch.equal(*pair) for pair in zip(*results, strict=True))


def _saving_products():
    return create_selective_checkpoint_contexts([torch.ops.aten.bmm.default])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rotate", "selective"), [("allgather", True), ("alltoall", True), ("heads", True), ("heads", False)]
)
def test_compiled_checkpoint_attends_over_all_ranks(rotate: str, selective: bool, gloo):
    assert gloo(2)(compiled_in_a_checkpoint, rotate, selective) == [True, True]


def refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    q = torch.randn(1, 1, 4, 8)

    def attempt(module: nn.Module, *args, rotate: str = "allgather") -> str:
        context_parallel_attention(module, mesh, rotate=rotate, balance="none")
        with pytest.raises(RunError) as error:
            module(*args)
        assert error.value.code == "RUN041"
        return error.value.message

    return [
        attempt(nn.Identity(), q),
        attempt(Attention(attn_mask=torch.zeros(4, 4)), q, q, q),
        attempt(Attention(dropout_p=0.1), q, q, q),
        attempt(Attention(), q, q[:, :, :2], q[:, :, :2]),
        attempt(Attention(), q.expand(1, 4, 4, 8), q, q),
        attempt(Attention(), q, q, q, rotate="heads"),
    ]


def test_unsupported_attention_is_refused(gloo):
    for none, mask, dropout, cross, heads, alone in gloo(2)(refusals):
        assert "did not call scaled_dot_product_attention" in none
        assert "with a mask" in mask
        assert "with dropout" in dropout
        assert "4 queries and 2 keys" in cross
        assert "4 heads of queries and 1 of keys" in heads
        assert "2 ranks cannot share 1 heads" in alone


def test_model_without_a_positions_parameter_is_refused():
    with pytest.raises(RunError, match="no parameter `positions`"):
        check_takes_positions(nn.Linear(1, 1))
