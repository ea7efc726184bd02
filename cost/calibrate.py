"""What does this machine do: measure its kernels and collectives, and write them as a profile."""

from __future__ import annotations

import datetime
import hashlib
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from legoai.cost.calibrate_network import collectives
from legoai.cost.kernels import seconds_of
from legoai.cost.kernels.roofline import AttentionCurve, MovementCurve, ProductCurve
from legoai.cost.kernels.work import ITEM_BYTES, Attention, Product
from legoai.cost.profiles import from_document

PRODUCT_SIZES: Final = (32, 128, 512, 1024, 2048)
GPU_PRODUCT_SIZES: Final = (256, 1024, 4096, 8192)
SEQUENCES: Final = (128, 512, 2048)
HELD_OUT: Final = 5
MOVEMENTS: Final = (
    "elementwise",
    "reduction",
    "normalisation",
    "softmax",
    "embedding",
    "copy",
    "fill",
    "optimizer",
    "loss",
)


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds that a calibration may still take; measurements end when their share is over."""

    deadline: float

    @classmethod
    def of(cls, seconds: float) -> Budget:
        """From now on."""
        return cls(time.perf_counter() + seconds)

    def left(self) -> float:
        """Seconds that are left; never negative."""
        return max(0.0, self.deadline - time.perf_counter())


def measure(run: Callable[[], object], device: str, budget: float) -> tuple[float, float]:
    """The least and the 75th percentile of the seconds of ``run``, over repetitions within ``budget`` seconds.

    Each repetition runs often enough to last half a millisecond. Other work of the machine only ever adds to a time, so
    that the least is the machine's own.
    """
    finish = torch.cuda.synchronize if device == "cuda" else _nothing
    run()
    finish()
    begin = time.perf_counter()
    run()
    finish()
    once = max(time.perf_counter() - begin, 1e-7)
    inner = max(1, min(1000, math.ceil(5e-4 / once)))
    times: list[float] = []
    end = begin + budget
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 200):
        start = time.perf_counter()
        for _ in range(inner):
            run()
        finish()
        times.append((time.perf_counter() - start) / inner)
        if once * inner > budget and len(times) >= 2:
            break
    times.sort()
    return times[0], times[int(0.75 * (len(times) - 1))]


def _nothing() -> None:
    return None


def calibrate(
    *,
    device: str,
    name: str,
    seconds: float,
    progress: Callable[[str], None] = lambda text: None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Measure ``device`` (`cpu` or `cuda`) for about ``seconds`` seconds; the result is a profile's JSON object.

    With a process ``group`` the collectives among its ranks are measured too, and all its ranks must call this; only
    rank 0 measures kernels, and only its result is whole.

    Args:
        device: torch's device type.
        name: of the profile: the catalogue's device, or another.
        seconds: to take, about.
        progress: told what is measured.
        group: the ranks on this machine.
    """
    rank = dist.get_rank(group) if group is not None else 0
    links: dict[str, dict[str, Any]] = {}
    if group is not None:
        links = collectives(group, device, seconds / 3, progress if rank == 0 else lambda text: None)
    if rank != 0:
        return {}
    budget = seconds * (2 / 3 if group is not None else 1)
    rates = ("fp32", "bf16", "fp64") if device == "cpu" else ("bf16", "tf32", "fp32", "fp64")
    share = budget / (len(rates) + 2)
    bandwidth, moves, held_moves = movements(device, share, progress)
    products: dict[str, Any] = {}
    held: dict[str, Any] = dict(held_moves)
    for rate in rates:
        products[rate], held[f"products {rate}"] = matrix_products(device, rate, share, bandwidth, progress)
    attentions: dict[str, Any] = {}
    for backward in (False, True):
        key = f"flash2 {'backward' if backward else 'forward'}"
        rate = rates[0]
        peak = products[rate]["curve"]["peak"]
        progress(f"attention {'backward' if backward else 'forward'}, {rate}")
        rows = attention_rows(device, rate, backward=backward, seconds=share / 2)
        attentions[f"{key} {rate}"] = _attention_model(rows, peak, bandwidth)
    gap = moves["elementwise"].pop("least")
    if device == "cuda":
        products["fp16"] = {"like": "bf16", "derived": "the rate of bf16, which the tensor cores share"}
    for key in list(attentions):
        *kind, rate = key.split()
        for other in sorted(set(products) - {rate}):
            attentions[" ".join([*kind, other])] = {"like": key, "derived": f"the seconds of {rate}; not measured"}
    return {
        "format": 1,
        "device": name,
        "made": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "constants": {
            "dispatch_seconds": {"value": gap, "source": "measured here: the least time of an addition of one element"},
            "kernel_gap_seconds": {"value": 0.0, "source": "part of every time that was measured here"},
        },
        "products": products,
        "attention": attentions,
        "movement": moves,
        "arithmetic": {},
        "links": links,
        "sources": [machine(device)],
        "held_out": held,
    }


def machine(device: str) -> dict[str, Any]:
    """What was measured, and with what."""
    described = torch.cuda.get_device_name() if device == "cuda" else processor_name()
    return {
        "what": "kernels and collectives",
        "from": f"legoai calibrate on {described}, {torch.get_num_threads()} threads, {platform.system()}",
        "dated": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
    }


def processor_name() -> str:
    """The processor as the operating system names it, and its architecture where it does not."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123 - a virtual file
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0]} ({len(names)} cores)" if names else platform.machine()


def _tensor(shape: Sequence[int], rate: str, device: str) -> torch.Tensor:
    dtypes = {
        "fp32": torch.float32,
        "tf32": torch.float32,
        "fp64": torch.float64,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
    }
    return torch.randn(*shape, device=device).to(dtypes[rate])


def _shapes(device: str) -> Iterator[tuple[int, int, int, int]]:
    """Batch, m, n, k: cubes first, then long and flat ones, small ones before large."""
    sizes = PRODUCT_SIZES if device == "cpu" else GPU_PRODUCT_SIZES
    yield from ((1, size, size, size) for size in sizes)
    shapes = [(1, m, n, k) for m in sizes for n in sizes for k in sizes if not m == n == k]
    shapes += [(batch, m, m, 64) for batch in (8, 32) for m in sizes[:4]]
    yield from sorted(shapes, key=lambda shape: (hash_of(shape), math.prod(shape)))


def hash_of(values: Sequence[int]) -> int:
    """A fixed shuffle: the same on every machine and in every run."""
    return int.from_bytes(hashlib.sha256(repr(tuple(values)).encode()).digest()[:4], "big")


def matrix_products(
    device: str, rate: str, seconds: float, bandwidth: float, progress: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A curve and a table of products of one rate, and the table's error on shapes that it does not hold."""
    progress(f"matrix products, {rate}")
    budget = Budget.of(seconds)
    torch.backends.cuda.matmul.allow_tf32 = rate == "tf32"
    found: list[tuple[Product, float]] = []
    item = {"fp64": 8, "fp32": 4, "tf32": 4}.get(rate, 2)
    for batch, m, n, k in _shapes(device):
        if budget.left() == 0.0:
            break
        a, b = _tensor((batch, m, k), rate, device), _tensor((batch, k, n), rate, device)
        run = (lambda a=a[0], b=b[0]: torch.mm(a, b)) if batch == 1 else (lambda a=a, b=b: torch.bmm(a, b))
        least, _ = measure(run, device, max(0.02, budget.left() / 40))
        moved = item * batch * (m * k + k * n + m * n)
        found.append((Product(batch=batch, m=m, n=n, k=k, rate=rate, bytes=moved), least))
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
    return _product_model(curve, found), _error([time for _, time in held], answers)


def _product_model(curve: dict[str, Any], rows: Sequence[tuple[Product, float]]) -> dict[str, Any]:
    formula = ProductCurve.read(curve)
    points = [[math.log2(v) for v in (p.batch, p.m, p.n, p.k)] for p, _ in rows]
    ratios = [math.log(time / formula.seconds(product)) for product, time in rows]
    return {"curve": curve, "table": {"points": points, "ratios": ratios, "reach": 2.5}, "derived": ""}


def _only(model: dict[str, Any], rate: str) -> Any:
    """A profile of nothing but one model of products."""
    movement = {key: {"rate": 1.0, "floor": 0.0} for key in MOVEMENTS}
    return from_document(
        {
            "device": "trial", "made": "", "constants": {}, "products": {rate: model}, "attention": {},
            "movement": movement, "arithmetic": {}, "links": {}, "sources": [], "held_out": {},
        }
    )  # fmt: skip


def _error(measured: Sequence[float], predicted: Sequence[float]) -> dict[str, Any]:
    if not measured:
        return {"rows": 0}
    errors = sorted(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True))
    return {
        "rows": len(errors),
        "median": round(statistics.median(errors), 4),
        "mean": round(statistics.fmean(errors), 4),
        "p90": round(errors[int(0.9 * (len(errors) - 1))], 4),
    }


def attention_rows(device: str, rate: str, *, backward: bool, seconds: float) -> list[tuple[Attention, float]]:
    """Seconds of this device's fused attention, over heads, sequence and mask."""
    budget = Budget.of(seconds)
    rows: list[tuple[Attention, float]] = []
    shapes = [(heads, length, width) for length in SEQUENCES for heads in (4, 16) for width in (64, 128)]
    for (heads, length, width), causal in ((shape, causal) for shape in shapes for causal in (True, False)):
        if budget.left() == 0.0:
            break
        query, key, value = (
            _tensor((1, heads, length, width), rate, device).requires_grad_(backward) for _ in range(3)
        )
        with torch.set_grad_enabled(backward):
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        upstream = torch.randn_like(out)

        run = partial(_attend, query, key, value, out, upstream, causal=causal, backward=backward)
        least, _ = measure(run, device, max(0.02, budget.left() / 12))
        moved = (8 if backward else 4) * query.numel() * query.element_size()
        work = Attention(
            batch=1, heads=heads, key_heads=heads, queries=length, keys=length, head_dim=width, value_dim=width,
            causal=causal, backward=backward, rate=rate, implementation="flash2", bytes=moved,
        )  # fmt: skip
        rows.append((work, least))
    return rows


def _attention_model(rows: Sequence[tuple[Attention, float]], peak: float, bandwidth: float) -> dict[str, Any]:
    """A table of what was measured, and a curve through its best."""
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


def movements(
    device: str, seconds: float, progress: Callable[[str], None]
) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """Bandwidth of the largest size, a three-segment line for each kind, and their errors on every other size."""
    budget = Budget.of(seconds)
    largest = 2**24 if device == "cpu" else 2**28
    curves: dict[str, Any] = {}
    held: dict[str, Any] = {}
    kinds = _movement_kinds(device)
    for index, (kind, make) in enumerate(kinds.items()):
        progress(f"movement, {kind}")
        share = budget.left() / (len(kinds) - index)
        sizes = [2**power for power in range(8, int(math.log2(largest)) + 1)]
        points = []
        for size in sizes:
            run, moved = make(size)
            points.append((moved, measure(run, device, share / len(sizes))[0]))
        trial = {**three_segments(points[::2]), "points": points[::2]}
        answers = [_movement_seconds(trial, moved) for moved, _ in points[1::2]]
        held[f"movement {kind}"] = _error([time for _, time in points[1::2]], answers)
        curves[kind] = {
            **three_segments(points), "points": points, "floor": 0.0, "derived": "", "least": points[0][1],
        }  # fmt: skip
    for kind in MOVEMENTS:
        if kind not in curves:
            curves[kind] = {**curves["elementwise"], "derived": "an elementwise operator's; not measured"}
    for kind, curve in curves.items():
        if kind != "elementwise":
            curve.pop("least", None)
    return curves["elementwise"]["rate"], curves, held


def _movement_seconds(curve: dict[str, Any], moved: float) -> float:
    return MovementCurve.read({**curve, "floor": 0.0}).seconds(moved)


def _movement_kinds(device: str) -> dict[str, Callable[[int], tuple[Callable[[], object], int]]]:
    """For each kind, what makes a run over a number of elements, and the bytes that it moves."""
    item = ITEM_BYTES["float32"]

    def vector(size: int) -> torch.Tensor:
        return torch.randn(size, device=device)

    def elementwise(size: int) -> tuple[Callable[[], object], int]:
        a, b = vector(size), vector(size)
        return lambda: torch.add(a, b), 3 * item * size

    def reduction(size: int) -> tuple[Callable[[], object], int]:
        a = vector(size)
        return a.sum, item * size

    def copy(size: int) -> tuple[Callable[[], object], int]:
        a = vector(size)
        return a.clone, 2 * item * size

    def softmax(size: int) -> tuple[Callable[[], object], int]:
        a = vector(size).view(-1, min(size, 1024))
        return lambda: torch.softmax(a, -1), 2 * item * size

    def normalisation(size: int) -> tuple[Callable[[], object], int]:
        a = vector(size).view(-1, min(size, 1024))
        return lambda: torch.nn.functional.layer_norm(a, a.shape[-1:]), 2 * item * size

    def embedding(size: int) -> tuple[Callable[[], object], int]:
        width = min(size, 256)
        table, rows = vector(1024 * width).view(-1, width), torch.randint(1024, (size // width,), device=device)
        return lambda: torch.nn.functional.embedding(rows, table), 2 * item * size

    def fill(size: int) -> tuple[Callable[[], object], int]:
        return lambda: torch.zeros(size, device=device), item * size

    return {
        "elementwise": elementwise, "reduction": reduction, "copy": copy, "softmax": softmax,
        "normalisation": normalisation, "embedding": embedding, "fill": fill,
    }  # fmt: skip


def three_segments(points: Sequence[tuple[float, float]]) -> dict[str, float]:
    """The dissertation's line of section 4.4 through pairs of bytes and seconds, in order of size.

    The third segment's rate is that of the largest size. The two elbows are tried at every pair of measured sizes, the
    slopes between them follow from continuity and least squares, and the least absolute logarithmic error decides.
    """
    sizes = [math.log(moved) for moved, _ in points]
    times = [math.log(seconds) for _, seconds in points]
    rate = points[-1][0] / points[-1][1]
    best: tuple[float, dict[str, float]] | None = None
    for second in range(2, len(points)):
        at_second = sizes[second] - math.log(rate)
        for first in range(1, second):
            slope = (at_second - times[first]) / (sizes[second] - sizes[first])
            slope = min(max(slope, 0.0), 1.5)
            at_first = at_second - slope * (sizes[second] - sizes[first])
            spans = [sizes[first] - size for size in sizes[:first]]
            drops = [at_first - seconds for seconds in times[:first]]
            flat = sum(a * b for a, b in zip(spans, drops, strict=True)) / sum(a * a for a in spans)
            curve = {
                "rate": rate,
                "first": points[first][0],
                "second": points[second][0],
                "slope_first": min(max(flat, 0.0), 1.5),
                "slope_second": slope,
            }
            loss = sum(abs(math.log(_movement_seconds(curve, moved) / seconds)) for moved, seconds in points)
            if best is None or loss < best[0]:
                best = (loss, curve)
    assert best is not None, "a line needs at least three points"
    return best[1]
