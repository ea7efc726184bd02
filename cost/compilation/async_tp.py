"""AsyncTP: matrix products decomposed into chunks that overlap the collective before or after them.

Inductor's own pass finds the products and fuses each with its all-gather or reduce-scatter into one operator. The GPU
implementation of such an operator is in `torch.distributed._symmetric_memory`: each rank reads its peers' chunks over
the links with its copy engine, on two alternating streams, and computes with one chunk while the next one arrives. The
same chunks are recorded here, on the same streams. Not recorded are the barriers between the ranks, which take some
microseconds each, and the workspace that the peers read, which is not from torch's allocator.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from legoai.cost.compilation.schedule import Pieces, Slot, Work
from legoai.cost.simulated.device import SIM, SimulationError, Stream, backend, current_stream
from legoai.cost.simulated.operators.properties import description, operator, tensors, type_of
from legoai.cost.simulated.recorder import Capture
from legoai.cost.trace.records import Collective, WaitWork
from legoai.runtime.torch_internals.distributed.fake_world import group_size_by_name
from legoai.runtime.torch_internals.operators import OpOverload, tree_map
from legoai.runtime.torch_internals.patching import original, patched
from legoai.runtime.torch_internals.settings import disable_async_tp

aten = torch.ops.aten

_SYMMETRIC_MEMORY: Final = "torch.distributed._symmetric_memory"

_SIDE: Final[weakref.WeakKeyDictionary[Capture, Stream]] = weakref.WeakKeyDictionary()
"""The second stream of each simulation; torch uses one for all such operators."""


@contextlib.contextmanager
def symmetric_memory() -> Iterator[None]:
    """Let a program enable AsyncTP on the simulated device, and undo that on exit."""
    groups: dict[str, Any] = {}
    try:
        with (
            patched(f"{_SYMMETRIC_MEMORY}:enable_symm_mem_for_group", lambda name: groups.update({name: None})),
            patched(f"{_SYMMETRIC_MEMORY}:_group_name_to_store", groups),
        ):
            yield
    finally:
        disable_async_tp()


@contextlib.contextmanager
def as_with_nccl() -> Iterator[None]:
    """Make inductor's pass work in a build of PyTorch without CUDA and NCCL."""
    path = f"{_SYMMETRIC_MEMORY}:make_contiguous_for_perm"
    with_strides = original(path)

    def restrided(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
        result: torch.Tensor = with_strides(torch.empty_strided(tensor.shape, tensor.stride(), device="meta"), order)
        return result

    with (
        patched("torch.distributed:is_nccl_available", lambda: True),
        patched(path, restrided),
    ):
        yield


def is_in_pieces(function: OpOverload) -> bool:
    """Whether an operator is one of those that overlap computation and communication chunk by chunk."""
    return function.namespace == "symm_mem" and function._schema.name.partition("::")[2] in _READERS


def pieces_of(function: OpOverload, origin: torch.fx.Node, module: str) -> Pieces:
    """Return the chunks of an operator of inductor's pass.

    Raises:
        SimulationError: its chunks are not split along the first dimension in memory, unlike those of sequence
            parallelism.
    """
    values = tree_map(lambda item: item.meta["val"] if isinstance(item, torch.fx.Node) else item, _arguments(origin))
    return _READERS[function._schema.name.partition("::")[2]](values, origin.meta["val"], module)


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    """The arguments of a node by their names."""
    assert isinstance(node.target, OpOverload)
    names = [item.name for item in node.target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _gathered(values: dict[str, Any], out: Any, module: str) -> Pieces:
    """An all-gather, and products of the gathered tensor."""
    shard = values["A"]
    _refuse_columns(shard, values["gather_dim"])
    flat = _flat(shard.shape)
    pieces = []
    for index, right in enumerate(values["Bs"]):
        scaled = "A_scale" in values
        scales = (values["A_scale"], values["B_scales"][index]) if scaled else ()
        dtype = out[1][index].dtype
        pieces.append(_product(_like(shard, flat), right, scales, dtype, module))
    ranks = group_size_by_name(values["group_name"])
    kept = values.get("return_A", True)
    whole = (flat[0] * ranks, flat[1])
    return Pieces(
        group=values["group_name"], gathers=True, piece=type_of(_like(shard, flat)), products=tuple(pieces),
        first=_work(aten.copy_.default, (_like(shard, flat), _like(shard, flat)), {}, module), last=None, kept=kept,
        temporary=None if kept else _slot(whole, shard.dtype), module=module,
    )  # fmt: skip


def _scattered(values: dict[str, Any], out: Any, module: str) -> Pieces:
    """A product, and a reduce-scatter of its result."""
    left, right = values["A"], values["B"]
    scaled = "A_scale" in values
    dim = values["scatter_dim_after_maybe_reshape"] if scaled else values["scatter_dim"]
    _refuse_columns(left, dim)
    ranks = group_size_by_name(values["group_name"])
    rows, inner = _flat(left.shape)
    scales = (values["A_scale"], values["B_scale"]) if scaled else ()
    dtype = out.dtype
    part = _like(left, (rows // ranks, inner))
    product = _product(part, right, scales, dtype, module)
    piece = torch.empty(rows // ranks, right.shape[1], dtype=dtype, device="meta")
    stacked = piece.new_empty(ranks, *piece.shape)
    last = _work(aten.sum.dim_IntList, (stacked, [0]), {}, module)
    return Pieces(
        group=values["group_name"], gathers=False, piece=type_of(piece), products=(product,), first=None, last=last,
        kept=False, temporary=_slot((rows, right.shape[1]), dtype), module=module,
    )  # fmt: skip


_READERS: Final[dict[str, Callable[[dict[str, Any], Any, str], Pieces]]] = {
    "fused_all_gather_matmul": _gathered,
    "fused_all_gather_scaled_matmul": _gathered,
    "fused_matmul_reduce_scatter": _scattered,
    "fused_scaled_matmul_reduce_scatter": _scattered,
}


def _refuse_columns(tensor: torch.Tensor, dim: int) -> None:
    if dim % tensor.dim() == tensor.dim() - 1:
        raise SimulationError("a product that is split beside a collective along its last dimension is not supported")


def _flat(shape: Sequence[int]) -> tuple[int, int]:
    return torch.Size(shape[:-1]).numel(), int(shape[-1])


def _like(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return torch.empty(*shape, dtype=tensor.dtype, device="meta")


def _slot(shape: Sequence[int], dtype: torch.dtype) -> Slot:
    return Slot("", tuple(shape), (int(shape[1]), 1), 0, dtype)


def _product(
    left: torch.Tensor, right: torch.Tensor, scales: Sequence[torch.Tensor], dtype: torch.dtype, module: str
) -> Work:
    right = torch.empty_strided(right.shape, right.stride(), dtype=right.dtype, device="meta")
    if not scales:
        return _work(aten.mm.default, (left, right), {}, module)
    whole = [torch.empty(item.shape, dtype=item.dtype, device="meta") for item in scales]
    return _work(aten._scaled_mm.default, (left, right, *whole), {"out_dtype": dtype}, module)


def _work(function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], module: str) -> Work:
    known = operator(function)
    out = function(*args, **kwargs)
    results = [] if known.written else [out]
    inputs = list(tensors(args))
    said = description(function, known, args, kwargs, inputs=inputs, fresh=results, out=out)
    return Work(module=module, **said)


def run(capture: Capture, pieces: Pieces, record: Callable[[Work], None]) -> None:
    """Record the chunks of an operator, in the order and on the streams of PyTorch's implementation.

    Args:
        capture: takes the records of copies and of waits.
        pieces: of the operator.
        record: takes the record of a kernel.
    """
    ranks, axis, _ = capture.group(pieces.group)
    here = ranks.index(dist.get_rank())
    main, side = backend.current, _side_of(capture)
    side.wait_stream(main)
    if pieces.first is not None:
        record(pieces.first)
        side.wait_stream(main)
    if pieces.gathers:
        _record_all(pieces.products, record)
    for step in range(1, len(ranks)):
        with main if step % 2 == 0 else side:
            if not pieces.gathers:
                _record_all(pieces.products, record)
            other = here + step if pieces.gathers else here - step
            _copy(capture, pieces, (ranks[other % len(ranks)], ranks[here]), axis)
            if pieces.gathers:
                _record_all(pieces.products, record)
    if pieces.gathers and pieces.kept and pieces.first is not None:
        with main if len(ranks) % 2 == 0 else side:
            record(pieces.first)
    if not pieces.gathers:
        _record_all(pieces.products, record)
    main.wait_stream(side)
    if pieces.last is not None:
        record(pieces.last)


def temporary_of(pieces: Pieces) -> torch.Tensor | None:
    """The temporary tensor of an operator: the gathered input if it is not an output, or all partial results."""
    slot = pieces.temporary
    return None if slot is None else torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype, device=SIM)


def _side_of(capture: Capture) -> Stream:
    if capture not in _SIDE:
        _SIDE[capture] = Stream()
    return _SIDE[capture]


def _record_all(works: Sequence[Work], record: Callable[[Work], None]) -> None:
    for work in works:
        record(work)


def _copy(capture: Capture, pieces: Pieces, ranks: tuple[int, int], axis: str) -> None:
    """Record that a copy engine reads a chunk of a peer."""
    shape, dtype = pieces.piece.shape, pieces.piece.dtype
    work = capture.work_count
    capture.work_count += 1
    capture.record(
        Collective(
            work=work, stream=current_stream(), kind="peer_copy", ranks=ranks, axis=axis,
            bytes=torch.Size(shape).numel() * getattr(torch, dtype).itemsize, dtype=dtype,
            module=".".join(part for part in (capture.module, pieces.module) if part), phase=capture.phase,
        )
    )  # fmt: skip
    capture.record(WaitWork(current_stream(), work))
