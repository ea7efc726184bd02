"""Properties of operators: FLOPs, traffic and treatment of a call."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch.utils.flop_counter import conv_flop_count, flop_registry

from legoai.cost.simulated.device import SimulationError
from legoai.cost.simulated.operators.alignment import Matrix, alignments
from legoai.cost.trace.records import CollectiveKind, TensorType
from legoai.runtime.torch_internals.operators import OpOverload, is_traceable_wrapper_subclass_type

Treatment = Literal["kernel", "nothing", "copy", "read", "collective", "wait"]
"""How a call is recorded. `nothing` creates a view or reserves memory; `read` copies one value to the host.

Page-locking counts as reserving memory: a program locks its parameters in host memory once, in its first forward, in an
order that differs from that of its blocks.
"""

_NOTHING: Final = frozenset(
    {
        "aten._pin_memory", "aten._reshape_alias", "aten._unsafe_view", "aten.alias", "aten.detach", "aten.detach_",
        "aten.empty", "aten.empty_like", "aten.empty_strided", "aten.is_pinned", "aten.is_same_size",
        "aten.lift_fresh", "aten.new_empty",
        "aten.new_empty_strided", "aten.requires_grad_", "aten.resize_", "aten.set_",
        "aten.stride", "aten.sym_numel", "aten.sym_size", "aten.sym_storage_offset", "aten.sym_stride", "prim.device",
    }
)  # fmt: skip

_OVERWRITES: Final = frozenset(
    {
        "aten.bernoulli_", "aten.copy_", "aten.exponential_", "aten.fill_", "aten.normal_", "aten.random_",
        "aten.uniform_", "aten.zero_", "aten._foreach_copy_", "aten._foreach_zero_", "fsdp.all_gather_copy_in",
        "fsdp.chunk_cat", "fsdp.split_with_sizes_copy",
    }
)  # fmt: skip
"""In-place operators that do not read what they overwrite."""

_GATHERS: Final = frozenset({"aten.embedding", "aten.gather", "aten.index", "aten.index_select", "aten.take"})
"""Operators that read as much of their first argument as they write."""

_WRITES_SOME: Final = frozenset({"aten._fused_adam_", "aten._fused_adamw_", "aten._fused_sgd_", "aten._fused_adagrad_"})
"""Operators whose schema marks the gradients as written, although they are only when a loss scale is applied."""

_ATTENTION: Final = frozenset(
    {
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
    }
)
_ATTENTION_BACKWARD: Final = frozenset(
    {
        "aten._scaled_dot_product_flash_attention_backward",
        "aten._scaled_dot_product_flash_attention_for_cpu_backward",
        "aten._scaled_dot_product_efficient_attention_backward",
        "aten._scaled_dot_product_cudnn_attention_backward",
    }
)

FACTORS: Final = {"aten.mm": 0, "aten.bmm": 0, "aten.addmm": 1, "aten.baddbmm": 1}
"""Matrix products, each with the place of the first of its two factors among its tensors."""

_CONVOLUTIONS: Final = {"aten.convolution": 0, "aten.convolution_backward": 1}
"""Convolutions, each with the place of the images among its tensors; the weight follows."""

_GROUPED: Final = frozenset({"aten._grouped_mm", "aten._scaled_grouped_mm"})
"""Products for which PyTorch has no FLOP formula."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """Properties of an operator that do not depend on its arguments.

    Attributes:
        name: such as `aten.mm`.
        treatment: how a call is recorded.
        collective: its kind, if it is a collective.
        group: the index of the argument that names the process group.
        written: arguments that it writes.
    """

    name: str
    treatment: Treatment
    collective: CollectiveKind | None = None
    group: int = 0
    written: tuple[str | int, ...] = ()


_COLLECTIVES: Final[Mapping[str, tuple[CollectiveKind, int]]] = {
    "c10d._allgather_base_": ("all_gather", 2),
    "c10d.allgather_": ("all_gather", 2),
    "c10d.allgather_into_tensor_coalesced_": ("all_gather", 2),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 2),
    "c10d.reduce_scatter_": ("reduce_scatter", 2),
    "c10d.reduce_scatter_tensor_coalesced_": ("reduce_scatter", 2),
    "c10d.allreduce_": ("all_reduce", 1),
    "c10d.allreduce_coalesced_": ("all_reduce", 1),
    "c10d.broadcast_": ("broadcast", 1),
    "c10d.alltoall_": ("all_to_all", 2),
    "c10d.alltoall_base_": ("all_to_all", 2),
    "c10d.send": ("send", 1),
    "c10d.recv_": ("receive", 1),
    "c10d.barrier": ("barrier", 1),
    "_c10d_functional.all_gather_into_tensor": ("all_gather", 2),
    "_c10d_functional.all_gather_into_tensor_out": ("all_gather", 2),
    "_c10d_functional.all_gather_into_tensor_coalesced": ("all_gather", 2),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", 3),
    "_c10d_functional.reduce_scatter_tensor_coalesced": ("reduce_scatter", 3),
    "_c10d_functional.all_reduce": ("all_reduce", 2),
    "_c10d_functional.all_reduce_": ("all_reduce", 2),
    "_c10d_functional.all_reduce_coalesced": ("all_reduce", 2),
    "_c10d_functional.all_reduce_coalesced_": ("all_reduce", 2),
    "_c10d_functional.all_to_all_single": ("all_to_all", 3),
    "_c10d_functional.broadcast": ("broadcast", 2),
    "_c10d_functional.broadcast_": ("broadcast", 2),
    "_dtensor.shard_dim_alltoall": ("all_to_all", 3),
}


ASKS_DEVICE: Final = torch.ops.prim.device.default
"""Operator that asks for the device of a tensor."""


class UnknownCollective(ValueError):  # noqa: N818 (it names what was met)
    """An operator communicates in a way that has no record type."""


@functools.cache
def wraps(kind: type) -> bool:
    """Whether tensors of a type consist of others, as DTensors do."""
    return is_traceable_wrapper_subclass_type(kind)


@functools.cache
def name_of(func: OpOverload) -> str:
    """Return the name of an operator, such as `aten.mm`, whatever the overload."""
    return f"{func.namespace}.{func._schema.name.partition('::')[2]}"


@functools.cache
def operator(func: OpOverload) -> Operator:
    """Return the properties of an operator.

    Raises:
        UnknownCollective: it communicates, and is none of the known collectives.
        SimulationError: its effect on memory is not supported.
    """
    name = name_of(func)
    written = tuple(
        item.name if item.kwarg_only else index
        for index, item in enumerate(func._schema.arguments)
        if item.alias_info is not None and item.alias_info.is_write
    )
    if name in _COLLECTIVES:
        kind, group = _COLLECTIVES[name]
        return Operator(name=name, treatment="collective", collective=kind, group=group, written=written)
    if name == "_c10d_functional.wait_tensor":
        return Operator(name=name, treatment="wait")
    if name == "_c10d_functional._wrap_tensor_autograd":
        return Operator(name=name, treatment="nothing")
    if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"):
        raise UnknownCollective(name)
    if name == "aten.record_stream":
        raise SimulationError(
            "`record_stream` delays the reuse of memory until another stream has passed a point, which is not "
            "captured; let the stream that allocated the tensor wait for an event, as FSDP does"
        )
    if name == "aten._local_scalar_dense":
        return Operator(name=name, treatment="read")
    if name in _NOTHING or func.is_view:
        return Operator(name=name, treatment="nothing")
    if name in ("aten._to_copy", "aten.copy_"):
        return Operator(name=name, treatment="copy", written=written)
    if name in _WRITES_SOME:
        grads = next(index for index, item in enumerate(func._schema.arguments) if item.name == "grads")
        written = tuple(item for item in written if item != grads)
    return Operator(name=name, treatment="kernel", written=written)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an argument or result, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def size_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's distinct elements; those that a dim of stride 0 repeats count once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride or not size:
            count *= size
    return count * tensor.itemsize


_DTYPES: Final[dict[torch.dtype, str]] = {}


_OF_TARGETS: Final = {"aten.nll_loss_forward": 0, "aten.nll_loss_backward": 1}
"""Operators that read at most one entry of each row of an operand, and the operand's place."""


def type_of(tensor: torch.Tensor) -> TensorType:
    """Return shape and dtype."""
    dtype = tensor.dtype
    if dtype not in _DTYPES:
        _DTYPES[dtype] = str(dtype).removeprefix("torch.")
    return TensorType(tuple(tensor.shape), _DTYPES[dtype])


def traffic(
    known: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[torch.Tensor], new: int
) -> tuple[int, int]:
    """Return the bytes that a call must read and those that it must write, each once.

    Args:
        known: the operator.
        args: of the call.
        kwargs: of the call.
        inputs: all tensors among them.
        new: bytes of newly allocated outputs.
    """
    written: list[torch.Tensor] = []
    for key in known.written:
        value = kwargs.get(key) if isinstance(key, str) else args[key] if key < len(args) else None
        written.extend(tensors(value))
    over = sum(map(size_of, written))
    if known.name == "fsdp.all_gather_copy_in":
        moved = sum(map(size_of, tensors(args[0])))
        return moved, moved
    if known.name == "bucketing._pre_bucket_all_gather":  # fills this rank's part of the buffer
        return sum(map(size_of, inputs)), new // args[1]
    if known.name in _GATHERS:
        return new + sum(map(size_of, inputs[1:])), new
    if known.name in _OF_TARGETS:  # one logarithm of each sample, or none: those are read by the gradient of a softmax
        return sum(map(size_of, inputs)) - size_of(args[_OF_TARGETS[known.name]]), new
    read = sum(map(size_of, inputs))
    if overwrites(known):
        read -= over
    return read, over + new


def overwrites(known: Operator) -> bool:
    """Whether an operator does not read what it writes in place."""
    return known.name in _OVERWRITES or "out" in known.written


def whole_buffer(known: Operator, args: Sequence[Any], out: Any) -> list[torch.Tensor]:
    """Return the tensors that together form the buffer whose size the record of a collective states."""
    if known.collective == "barrier":
        return []
    if known.name.startswith("c10d."):
        output_first = known.group == 2
        if output_first:
            place = 0 if known.collective == "all_gather" else 1
            return list(tensors(args[place]))
        return list(tensors(args[0]))
    if known.collective == "all_gather":
        return list(tensors(out))
    return list(tensors(args[0]))


def permutes(known: Operator, args: Sequence[Any]) -> bool:
    """Return whether an all-to-all sends its whole input to one rank, as torch's `permute_tensor` does."""
    if known.name != "_c10d_functional.all_to_all_single":
        return False
    sent = [rows for rows in args[2] if not isinstance(rows, int) or rows]
    return len(sent) == 1 and len(args[2]) > 1


def flops(func: OpOverload, known: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the floating-point operations of matrix products, convolutions and attention; 0 for all other operators.

    Attention is counted without regard to a causal mask: two products of queries and keys in forward, five in
    backward, which computes the scores again (Dao 2023, section 3.1).
    """
    if known.name in _ATTENTION:
        return _attention_flops(args[0], args[1], args[2], products=1)
    if known.name in _ATTENTION_BACKWARD:
        return _attention_flops(args[1], args[2], args[3], products=2.5)
    if known.name in _GROUPED:
        return _grouped_flops(args[0], args[1])
    if known.name == "aten.convolution_backward":
        return _convolution_backward_flops(*args[:3], transposed=args[7], gradients=args[10][:2])
    count = flop_registry.get(func.overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, products: float) -> int:
    *outer, queries, width = query.shape
    one = 2 * math.prod(outer) * queries * key.shape[-2]
    return int(products * one * (width + value.shape[-1]))


def _grouped_flops(left: torch.Tensor, right: torch.Tensor) -> int:
    """Return FLOPs of products whose ragged groups together cover all rows, columns, or the summed dim."""
    shared = left.shape[0] if left.dim() > right.dim() else 1
    return 2 * left.numel() // shared * right.shape[-1]


def _convolution_backward_flops(
    result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, transposed: bool, gradients: Sequence[bool]
) -> int:
    """Return FLOPs of the gradients of input and weight, each of which multiplies as often as forward.

    torch's formula of the gradient of the weight multiplies by all channels, also where groups divide them.
    """
    forward = conv_flop_count([*x.shape], [*weight.shape], [*result.shape], transposed=transposed)
    return forward * sum(gradients)


def attributes(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return further arguments that affect the time of a call."""
    wanted = _wanted(func)
    if not wanted:
        return {}
    found = {}
    for index, name, label in wanted:
        found[label] = args[index] if index < len(args) else kwargs.get(name)
    return {label: value for label, value in found.items() if value is not None}


def description(
    func: OpOverload,
    known: Operator,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    inputs: Sequence[torch.Tensor],
    fresh: Sequence[torch.Tensor],
    out: Any,
) -> dict[str, Any]:
    """Return the fields of a kernel's record for a call: what it computes, on which tensors, and how much.

    Args:
        func: the operator.
        known: its properties.
        args: of the call.
        kwargs: of the call.
        inputs: all tensors among them.
        fresh: newly allocated outputs.
        out: everything that the call returns.
    """
    read, written = traffic(known, args, kwargs, inputs, sum(item.numel() * item.itemsize for item in fresh))
    return {
        "op": known.name,
        "inputs": tuple(map(type_of, inputs)),
        "outputs": tuple(map(type_of, fresh)),
        "flops": flops(func, known, args, kwargs, out),
        "bytes_read": read,
        "bytes_written": written,
        "attributes": attributes(func, args, kwargs) | _layout(known, inputs, out),
    }


def _layout(known: Operator, inputs: Sequence[torch.Tensor], out: Any) -> dict[str, Any]:
    """Return whether a convolution has its channels last in memory, or to what rows of a product are aligned."""
    if known.name in FACTORS:
        first = FACTORS[known.name]
        return dict(alignments(map(Matrix.of, inputs[first : first + 2]), Matrix.of(out)))
    if known.name not in _CONVOLUTIONS:
        return {}
    first = _CONVOLUTIONS[known.name]
    return {"channels_last": True} if convolves_channels_last(*inputs[first : first + 2]) else {}


def convolves_channels_last(images: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether cuDNN convolves in two dims with channels last: where images or weights have them there.

    As `cudnn_conv_suggest_memory_format` of `aten/src/ATen/native/ConvUtils.h` decides.
    """
    if torch.float64 in (images.dtype, weight.dtype):
        return False
    return weight.dim() == 4 and (_has_channels_last(images) or _has_channels_last(weight))


def _has_channels_last(tensor: torch.Tensor) -> bool:
    """Whether the strides say so, also of tensors with dims of size 1, for which either layout is contiguous."""
    if tensor.dim() != 4 or not tensor.is_contiguous(memory_format=torch.channels_last):
        return False
    return tensor.stride(3) >= tensor.stride(1) * tensor.shape[1] and tensor.shape[1:].numel() > 1


@functools.cache
def _wanted(func: OpOverload) -> tuple[tuple[int, str, str], ...]:
    labels = {
        "is_causal": "causal", "dropout_p": "dropout", "stride": "stride", "padding": "padding",
        "dilation": "dilation", "groups": "groups", "transposed": "transposed", "output_mask": "output_mask",
    }  # fmt: skip
    name = func._schema.name
    if "attention" not in name and "convolution" not in name:
        return ()
    return tuple(
        (index, item.name, labels[item.name])
        for index, item in enumerate(func._schema.arguments)
        if item.name in labels
    )
