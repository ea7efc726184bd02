"""Measured times of matrix products and attention on this machine, and curves fitted to them."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch

from legoai.cost.calibration.movement import MOVEMENTS, error_of
from legoai.cost.calibration.timing import Budget, Timer, out_of_cache
from legoai.cost.kernels.kinds import ALIGNED, Attention, Product
from legoai.cost.kernels.roofline import AttentionCurve, ProductCurve
from legoai.cost.kernels.work import STORED_AS, element_bytes
from legoai.cost.machine.kernel_time import narrow_rate, seconds_of
from legoai.cost.profiles import from_document
from legoai.cost.simulated.operators.alignment import Matrix, alignments
from legoai.specs.dtypes import TORCH_DTYPES

CPU_CUBES: Final = (64, 256, 512, 1024, 2048)
CPU_FLOPS: Final = 2.0**33
"""FLOPs of the largest product that is measured on a CPU: about a tenth of a second of one core."""
GPU_PRODUCT_SIZES: Final = (256, 1024, 4096, 8192)
SEQUENCES: Final = (128, 512, 2048)
HELD_OUT: Final = 5
_GROUPS: Final = 8


def _tensor(shape: Sequence[int], rate: str, device: str) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, TORCH_DTYPES[STORED_AS.get(rate, rate)])
    return torch.randn(*shape, device=device).to(dtype)


def _shapes(device: str) -> Iterator[tuple[int, int, int, int]]:
    """Batch, m, n, k: cubes first, then long and flat ones."""
    if device == "cpu":
        yield from ((1, size, size, size) for size in CPU_CUBES)
        yield from _spread()
        return
    sizes = GPU_PRODUCT_SIZES
    yield from ((1, size, size, size) for size in sizes)
    shapes = [(1, m, n, k) for m in sizes for n in sizes for k in sizes if not m == n == k]
    shapes += [(batch, m, m, 64) for batch in (8, 32) for m in sizes[:4]]
    yield from sorted(shapes, key=lambda shape: (hash_of(shape), math.prod(shape)))


def _spread() -> Iterator[tuple[int, int, int, int]]:
    """Yield shapes spread evenly over the logarithms of m, n and k from 16 to 8192, for any number of shapes.

    The additive recurrence of the plastic number's analogue in three dims (Roberts 2018, "The unreasonable
    effectiveness of quasirandom sequences"), whose ratio solves x^4 = x + 1.
    """
    ratio = 1.2207440846057596
    for index in range(1, 1000):
        sizes = [16 * 2 ** (9 * ((0.5 + index / ratio**power) % 1)) for power in (1, 2, 3)]
        m, n, k = (16 * round(size / 16) for size in sizes)
        if 2.0 * m * n * k <= CPU_FLOPS:
            yield (1, m, n, k)


def hash_of(values: Sequence[int]) -> int:
    """Return a fixed pseudo-random key, the same on every machine and in every run."""
    return int.from_bytes(hashlib.sha256(repr(tuple(values)).encode()).digest()[:4], "big")


def matrix_products(
    timer: Timer, rate: str, seconds: float, bandwidth: float, progress: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a curve and a table of products of one rate, and the table's error on held-out shapes."""
    progress(f"matrix products, {rate}")
    budget = Budget.of(seconds)
    torch.backends.cuda.matmul.allow_tf32 = rate == "tf32"
    found: list[tuple[Product, float]] = []
    item = element_bytes(rate)
    for batch, m, n, k in _shapes(timer.device):
        if not timer.has_time_left(budget):
            break
        moved = item * batch * (m * k + k * n + m * n)
        run = out_of_cache(_products(timer.device, rate, (batch, m, n, k)), moved, least=len(_LAYOUTS))
        time = timer.seconds(run, max(0.02, seconds / 60))
        found.append((Product(batch=batch, m=m, n=n, k=k, rate=rate, bytes=moved), time))
    peak = max(product.flops / time for product, time in found)
    curve = {
        "peak": peak,
        "bandwidth": bandwidth,
        "efficiency": 1.0,
        "sustained": None,
        "floor": min(time for _, time in found),
        "processors": 1,
        "tiles": [[16, 16, 1.0]],
        "split": 256,
    }
    held = [pair for index, pair in enumerate(found) if index % HELD_OUT == HELD_OUT - 1]
    known = [pair for index, pair in enumerate(found) if index % HELD_OUT != HELD_OUT - 1]
    trial = _product_model(curve, known)
    answers = [seconds_of(product, _only(trial, rate))[0] for product, _ in held]
    return _product_model(curve, found), error_of([time for _, time in held], answers)


def unaligned_products(timer: Timer, curve: Mapping[str, Any], seconds: float, size: int) -> dict[str, dict[str, Any]]:
    """Return a profile's constants for large products whose rows are not aligned (`kernel_time.narrow_rate`).

    Args:
        timer: of the device.
        curve: of aligned products of half precision.
        seconds: to take, about.
        size: of the products' dims, about; a multiple of 16.
    """
    found = {}
    for more_n, more_k in ((1, 0), (2, 0), (0, 1), (0, 2)):
        n, k = size + more_n, size + more_k
        x, weight = _tensor((size, k), "bf16", timer.device), _tensor((n, k), "bf16", timer.device)
        out = x @ weight.t()
        aligned = alignments(map(Matrix.of, (x, weight)), Matrix.of(out))
        product = Product(
            batch=1, m=size, n=n, k=k, rate="bf16", bytes=sum(one.nbytes for one in (x, weight, out)),
            operands_aligned=aligned.get("operands_aligned", ALIGNED),
            result_aligned=aligned.get("result_aligned", ALIGNED),
        )  # fmt: skip
        name = narrow_rate(product)
        assert name is not None, "the sizes are odd"
        time = timer.seconds(partial(torch.mm, x, weight.t()), seconds / 4)
        work = product.flops * ProductCurve.read(curve).waste(product)
        source = f"measured here: a product of {size} by {k} with {k} by {n}"
        found[name] = {"value": work / max(time - curve["floor"], time / 2), "source": source}
    return found


def products_by_groups(timer: Timer, curve: Mapping[str, Any], seconds: float, size: int) -> dict[str, Any]:
    """Return a profile's model of bf16 products by groups, as of experts, from groups of many and of few rows.

    Args:
        timer: of the device, which has a kernel for such products.
        curve: of single products of half precision.
        seconds: to take, about.
        size: of the products' other dims, and rows of a large group; the small ones have a 16th.
    """
    formula, seen = ProductCurve.read(curve), []
    for rows in (size // 16, size):
        x, weight = _tensor((_GROUPS * rows, size), "bf16", timer.device), _tensor((size, size), "bf16", timer.device)
        ends = torch.arange(rows, _GROUPS * rows + 1, rows, dtype=torch.int32, device=timer.device)
        weights = weight.expand(_GROUPS, size, size).clone()
        time = timer.seconds(partial(torch.ops.aten._grouped_mm, x, weights, ends), seconds / 2)
        work = Product(batch=_GROUPS, m=rows, n=size, k=size, rate="bf16", bytes=0, group=rows)
        at_peak = work.flops * formula.waste(work) / formula.peak
        seen.append((1.0 / rows, max(time - formula.floor, time / 2) / at_peak))
    (few, slow), (many, fast) = seen
    more = max(0.0, (slow - fast) / (few - many))  # of 1 / efficiency, for each 1 / rows
    best = max(fast - more * many, fast / 2)
    return {
        "curve": {**curve, "efficiency": 1.0 / best, "sustained": None, "more_of_group": more / best},
        "derived": "",
    }


_LAYOUTS: Final = ((False, True), (False, False), (True, False))
"""Which operands of a linear layer's products are column-major: of the output, the input's gradient, the weight's."""


def _products(device: str, rate: str, shape: tuple[int, int, int, int]) -> Callable[[], Callable[[], object]]:
    """Return a factory of one product and its operands, alternating between the layouts of a linear layer."""
    batch, m, n, k = shape
    a, b = _tensor((batch, m, k), rate, device), _tensor((batch, k, n), rate, device)
    if batch > 1:
        return lambda: partial(torch.bmm, a.clone(), b.clone())
    layouts = itertools.cycle(_LAYOUTS)

    def make() -> Callable[[], object]:
        return partial(torch.mm, *map(_laid_out, (a[0], b[0]), next(layouts)))

    return make


def _laid_out(matrix: torch.Tensor, by_columns: bool) -> torch.Tensor:
    """Return a copy of a matrix, row-major or column-major."""
    return matrix.t().contiguous().t() if by_columns else matrix.clone()


def _product_model(curve: dict[str, Any], rows: Sequence[tuple[Product, float]]) -> dict[str, Any]:
    formula = ProductCurve.read(curve)
    points = [[math.log2(v) for v in (p.batch, p.m, p.n, p.k)] for p, _ in rows]
    ratios = [math.log(time / formula.seconds(product)) for product, time in rows]
    return {"curve": curve, "table": {"points": points, "ratios": ratios, "reach": 2.5}, "derived": ""}


def _only(model: dict[str, Any], rate: str) -> Any:
    """Return a profile that holds only one model of products."""
    movement = {key: {"rate": 1.0, "floor": 0.0} for key in MOVEMENTS}
    return from_document(
        {
            "device": "trial", "made": "", "constants": {}, "products": {rate: model}, "attention": {},
            "movement": movement, "arithmetic": {}, "links": {}, "sources": [], "held_out": {},
        }
    )  # fmt: skip


def attention_rows(timer: Timer, rate: str, *, backward: bool, seconds: float) -> list[tuple[Attention, float]]:
    """Measure the seconds of this device's fused attention, over heads, sequence and mask."""
    budget = Budget.of(seconds)
    rows: list[tuple[Attention, float]] = []
    shapes = [(heads, length, width) for length in SEQUENCES for heads in (4, 16) for width in (64, 128)]
    for (heads, length, width), causal in ((shape, causal) for shape in shapes for causal in (True, False)):
        if not timer.has_time_left(budget):
            break
        query, key, value = (
            _tensor((1, heads, length, width), rate, timer.device).requires_grad_(backward) for _ in range(3)
        )
        with torch.set_grad_enabled(backward):
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        upstream = torch.randn_like(out)

        run = partial(_attend, query, key, value, out, upstream, causal=causal, backward=backward)
        time = timer.seconds(run, max(0.02, seconds / 12))
        moved = (8 if backward else 4) * query.numel() * query.element_size()
        work = Attention(
            batch=1, heads=heads, key_heads=heads, queries=length, keys=length, head_dim=width, value_dim=width,
            causal=causal, backward=backward, rate=rate, implementation="flash2", bytes=moved,
        )  # fmt: skip
        rows.append((work, time))
    return rows


def attention_model(rows: Sequence[tuple[Attention, float]], peak: float, bandwidth: float) -> dict[str, Any]:
    """Return a table of the measurements, and a curve through the best of them."""
    best = {mask: max((w.flops / t / peak for w, t in rows if w.causal == mask), default=0.1) for mask in (True, False)}
    curve = {
        "peak": peak,
        "bandwidth": bandwidth,
        "floor": min(time for _, time in rows) / 2,
        "processors": 1,
        "limits": {"128 causal": [best[True], 0.0, 0.0], "128 full": [best[False], 0.0, 0.0]},
    }
    formula = AttentionCurve.read(curve)
    points = [
        [
            *(math.log2(v) for v in (w.heads, w.queries, w.keys, w.head_dim + w.value_dim)),
            4.0 * w.causal,
        ]
        for w, _ in rows
    ]
    ratios = [math.log(time / formula.seconds(work)) for work, time in rows]
    return {"curve": curve, "table": {"points": points, "ratios": ratios, "reach": 3.0}, "derived": ""}


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, upstream: torch.Tensor, *,
    causal: bool, backward: bool,
) -> object:  # fmt: skip
    if backward:
        return torch.autograd.grad(out, (query, key, value), upstream, retain_graph=True)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
