"""Floating-point operations of a model in one step, independent of how it is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, cast

from legoai.cost.trace.records import Kernel
from legoai.cost.trace.segments import Instance, Item, Segment
from legoai.dsl.analysis.magnitudes.flops import DECODERS, FORMULA, FORWARD_AND_BACKWARD, flops_per_token
from legoai.runtime.attention.blocks import Balance, Block, blocks_of_rank
from legoai.specs.dtypes import ITEM_BYTES, TORCH_DTYPES
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.plan import Plan

_PLAN_DTYPES: Final = {of_torch: name for name, of_torch in TORCH_DTYPES.items()}
_FLOATING: Final = frozenset(dtype for dtype in ITEM_BYTES if dtype.startswith(("float", "bfloat")))

CAPTURED: Final = "3 times the forward products that were captured, on all ranks"
CAPTURED_ALONE: Final = "3 times the forward products that were captured on one device, of all micro batches"


def model_flops(
    plan: Plan,
    manifest: Manifest,
    steps: Mapping[int, Sequence[Item]],
    alone: Callable[[], int],
) -> tuple[float, str]:
    """Return the floating-point operations of the model in one optimizer step, on all devices, and the convention.

    For the built-in decoders they follow from the model
    (:func:`~legoai.dsl.analysis.magnitudes.flops.flops_per_token`). For other models it is three times the products of
    a captured rank's forward, times the ranks. Ranks of `tp` repeat the work of modules that they do not share, so
    that with them the products are those of one device. Attention is counted without regard to a causal mask, though
    ranks of `cp` skip the blocks that it hides. Recomputation never counts.

    Args:
        plan: the plan.
        manifest: of its model.
        steps: the items of one step by global rank, of one rank for each stage of a pipeline.
        alone: returns the products of the forward of one micro batch on one device.
    """
    if plan.model.family in DECODERS:
        length = plan.batch.seq_len
        assert length is not None, "a decoder reads sequences"
        tokens = plan.batch.global_batch * length
        return float(tokens * flops_per_token(manifest, length)), FORMULA
    if plan.mesh.tp > 1:
        return float(FORWARD_AND_BACKWARD * alone() * plan.batch.global_batch / plan.batch.micro_batch), CAPTURED_ALONE
    forward = 0.0
    for rank, items in steps.items():
        found = [_forward(item) for item in items]
        forward += sum(item.products for item in found)
        forward += sum(item.causal for item in found) * _skipped(plan, rank)
    return float(FORWARD_AND_BACKWARD * forward * plan.mesh.world_size / len(steps)), CAPTURED


def product_dtype(plan: Plan, steps: Mapping[int, Sequence[Item]]) -> str:
    """Return the plan's name of the dtype in which most of the forward's FLOPs are.

    That of `precision param` for the built-in decoders, and for products in float8; other models may cast by
    themselves, as under `torch.autocast`.

    Args:
        plan: the plan.
        steps: as of :func:`model_flops`.
    """
    param = plan.precision.param
    if plan.model.family in DECODERS:
        return param
    flops: Counter[str] = Counter({param: 0})  # the first of equal ones
    for items in steps.values():
        for item in items:
            for dtype, amount in _forward(item).by_dtype:
                flops[_PLAN_DTYPES.get(dtype, param)] += amount
    return max(flops, key=lambda name: flops[name])


def forward_products(items: Iterable[Item]) -> int:
    """Return the forward FLOPs of the items of a trace."""
    return sum(_forward(item).products for item in items)


class _Flops(NamedTuple):
    """Forward FLOPs of all kernels, those among them of attention under a causal mask, and all by torch's dtype."""

    products: int = 0
    causal: int = 0
    by_dtype: tuple[tuple[str, int], ...] = ()


class ForwardFlops:
    """Forward FLOPs of a segment's kernels."""

    def __init__(self, segment: Segment) -> None:
        found = list(map(_forward, segment.records))
        dtypes: Counter[str] = Counter()
        for item in found:
            dtypes.update(dict(item.by_dtype))
        self.total = _Flops(
            sum(item.products for item in found), sum(item.causal for item in found), tuple(dtypes.items())
        )


def _forward(item: Item) -> _Flops:
    """Return the forward FLOPs of an item of a trace."""
    if isinstance(item, Instance):
        return item.segment.summary(ForwardFlops).total
    if not isinstance(item, Kernel) or item.phase != "forward":
        return _Flops()
    if not item.flops:
        return _Flops()
    dtypes = (one.dtype for one in item.inputs if one.dtype in _FLOATING)
    return _Flops(item.flops, item.flops if item.attributes.get("causal") else 0, ((next(dtypes, ""), item.flops),))


def _skipped(plan: Plan, rank: int) -> float:
    """FLOPs of the blocks of attention that a rank of `cp` skips for a causal mask, over those of its causal blocks."""
    context, size = plan.context, plan.mesh.cp
    if context is None or context.rotate == "heads":
        return 0.0
    length = 2  # any number that can be halved
    blocks = blocks_of_rank(
        rank=rank // plan.mesh.stride("cp") % size, size=size, length=length, causal=True,
        gathered=context.rotate == "allgather", balance=cast("Balance", context.dealt),
    )  # fmt: skip
    skipped = length * length * size - sum(map(_scores, blocks))
    return skipped / sum(_scores(block) for block in blocks if block.causal)


def _scores(block: Block) -> int:
    """Pairs of a query and a key in a block."""
    queries, keys = (len(range(one.start, one.stop)) for one in (block.queries, block.keys))
    return queries * keys
