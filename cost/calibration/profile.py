"""What does this machine do: measure its kernels and collectives, and write them as a profile."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from legoai.cost.calibration.movement import MOVEMENTS, error_of, movements
from legoai.cost.calibration.network import collectives
from legoai.cost.calibration.timing import Budget, Timer, out_of_cache
from legoai.cost.kernels import seconds_of
from legoai.cost.kernels.roofline import AttentionCurve, ProductCurve
from legoai.cost.kernels.work import Attention, Product
from legoai.cost.profiles import from_document
from legoai.cost.simulated.operators import operator

CPU_CUBES: Final = (64, 256, 512, 1024, 2048)
CPU_FLOPS: Final = 2.0**33
"""Of the largest product that is measured on a cpu: about a tenth of a second of one core."""
GPU_PRODUCT_SIZES: Final = (256, 1024, 4096, 8192)
SEQUENCES: Final = (128, 512, 2048)
HELD_OUT: Final = 5


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
    rank 0's result is whole. The ranks of a cpu share its cores and its memory: all measure every kernel at the same
    time, and the profile tells how fast one of as many ranks is while the others work too.

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
        links = collectives(group, device, seconds / 3, progress if rank == 0 else _silent)
    timer = Timer(device=device, group=group if device == "cpu" else None)
    if rank != 0:
        progress = _silent
        if timer.group is None:
            return {}
    budget = seconds * (2 / 3 if group is not None else 1)
    rates = ("fp32", "bf16", "fp64") if device == "cpu" else ("bf16", "tf32", "fp32", "fp64")
    share = budget / (len(rates) + 2)
    bandwidth, moves, held_moves = movements(timer, share, progress)
    products: dict[str, Any] = {}
    held: dict[str, Any] = dict(held_moves)
    for rate in rates:
        products[rate], held[f"products {rate}"] = matrix_products(timer, rate, share, bandwidth, progress)
    attentions: dict[str, Any] = {}
    measured = rates[:2] if device == "cpu" else rates[:1]
    for rate, backward in ((rate, backward) for rate in measured for backward in (False, True)):
        direction = "backward" if backward else "forward"
        progress(f"attention {direction}, {rate}")
        rows = attention_rows(timer, rate, backward=backward, seconds=share / (2 * len(measured)))
        attentions[f"flash2 {direction} {rate}"] = _attention_model(rows, products[rate]["curve"]["peak"], bandwidth)
    gap = moves["elementwise"].pop("least")
    constants = {
        "dispatch_seconds": {"value": gap, "source": "measured here: the least time of an addition of one element"},
        "kernel_gap_seconds": {"value": 0.0, "source": "part of every time that was measured here"},
    }
    if device == "cpu":
        progress("what the host does between two kernels")
        constants["dispatch_seconds"] = {"value": 0.0, "source": "on a cpu an operation is its own dispatch"}
        constants["kernel_gap_seconds"] = {"value": host_seconds(timer, share / 4), "source": HOST_SOURCE}
    if device == "cuda":
        products["fp16"] = {"like": "bf16", "derived": "the rate of bf16, which the tensor cores share"}
    for key in list(attentions):
        *kind, rate = key.split()
        for other in sorted(set(products) - set(measured)):
            attentions.setdefault(
                " ".join([*kind, other]), {"like": key, "derived": f"the seconds of {rate}; not measured"}
            )
    return {
        "format": 1,
        "device": name,
        "made": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "constants": constants,
        "products": products,
        "attention": attentions,
        "movement": moves,
        "arithmetic": {},
        "links": links,
        "sources": [machine(device, ranks=dist.get_world_size(group) if group is not None else 1)],
        "held_out": held,
    }


def machine(device: str, *, ranks: int) -> dict[str, Any]:
    """What was measured, and with what."""
    described = torch.cuda.get_device_name() if device == "cuda" else processor_name()
    return {
        "what": f"kernels and collectives of {ranks} ranks of one host" if ranks > 1 else "kernels of one process",
        "from": f"legoai calibrate on {described}, {torch.get_num_threads()} threads, {platform.system()}",
        "dated": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
    }


HOST_SOURCE: Final = (
    "measured here: forward and backward of a layer of two features over the operators that it runs, less what the "
    "same operators take when they are called alone"
)


def host_seconds(timer: Timer, budget: float) -> float:
    """Seconds that modules, autograd and Python take for each operator beside the operator itself."""
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SiLU(), torch.nn.Linear(2, 2), torch.nn.SiLU())
    inputs = torch.ones(2, 2)

    def step() -> None:
        layer(inputs).sum().backward()

    step()
    with _Operators() as seen:
        step()
    alone = torch.ones(2, 2)
    least = timer.seconds(lambda: torch.add(alone, alone), budget / 2)
    each: float = timer.seconds(step, budget / 2) / seen.count
    return max(0.0, each - least)


class _Operators(TorchDispatchMode):
    """Counts operators that compute."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operator(func).treatment in ("kernel", "copy")
        return func(*args, **(kwargs or {}))


def _silent(text: str) -> None:
    return None


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
    """Shapes spread evenly over the logarithms of m, n and k from 16 to 8192, however many are taken.

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
    """A fixed shuffle: the same on every machine and in every run."""
    return int.from_bytes(hashlib.sha256(repr(tuple(values)).encode()).digest()[:4], "big")


def matrix_products(
    timer: Timer, rate: str, seconds: float, bandwidth: float, progress: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A curve and a table of products of one rate, and the table's error on shapes that it does not hold."""
    progress(f"matrix products, {rate}")
    budget = Budget.of(seconds)
    torch.backends.cuda.matmul.allow_tf32 = rate == "tf32"
    found: list[tuple[Product, float]] = []
    item = {"fp64": 8, "fp32": 4, "tf32": 4}.get(rate, 2)
    for batch, m, n, k in _shapes(timer.device):
        if not timer.goes_on(budget):
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


_LAYOUTS: Final = ((False, True), (False, False), (True, False))
"""Which operands of a linear layer's products lie by columns: of the output, the input's gradient, the weights'."""


def _products(device: str, rate: str, shape: tuple[int, int, int, int]) -> Callable[[], Callable[[], object]]:
    """What makes operands and a run of one product; on a cpu by turns in the layouts of a linear layer's products."""
    batch, m, n, k = shape
    a, b = _tensor((batch, m, k), rate, device), _tensor((batch, k, n), rate, device)
    if batch > 1:
        return lambda: partial(torch.bmm, a.clone(), b.clone())
    if device != "cpu":
        return lambda: partial(torch.mm, a[0].clone(), b[0].clone())
    layouts = itertools.cycle(_LAYOUTS)

    def make() -> Callable[[], object]:
        return partial(torch.mm, *map(_laid_out, (a[0], b[0]), next(layouts)))

    return make


def _laid_out(matrix: torch.Tensor, by_columns: bool) -> torch.Tensor:
    """A copy of a matrix, by rows or by columns."""
    return matrix.t().contiguous().t() if by_columns else matrix.clone()


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


def attention_rows(timer: Timer, rate: str, *, backward: bool, seconds: float) -> list[tuple[Attention, float]]:
    """Seconds of this device's fused attention, over heads, sequence and mask."""
    budget = Budget.of(seconds)
    rows: list[tuple[Attention, float]] = []
    shapes = [(heads, length, width) for length in SEQUENCES for heads in (4, 16) for width in (64, 128)]
    for (heads, length, width), causal in ((shape, causal) for shape in shapes for causal in (True, False)):
        if not timer.goes_on(budget):
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
