"""Measured rates of memory-bound kernels on this machine."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from legoai.cost.calibration.timing import Budget, Timer, out_of_cache
from legoai.cost.kernels.roofline import MovementCurve
from legoai.cost.kernels.work import ITEM_BYTES
from legoai.runtime.torch_internals.operators import fused_adamw_

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


def movements(
    timer: Timer, seconds: float, progress: Callable[[str], None]
) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """Return the bandwidth of the largest size, a three-segment line for each kind, and errors on every other size."""
    budget = Budget.of(seconds)
    largest = 2**24 if timer.device == "cpu" else 2**28
    curves: dict[str, Any] = {}
    held: dict[str, Any] = {}
    kinds = _movement_kinds(timer.device, largest)
    for index, (kind, make) in enumerate(kinds.items()):
        progress(f"movement, {kind}")
        share = budget.left() / (len(kinds) - index)
        sizes = [2**power for power in range(8, int(math.log2(largest)) + 1)]
        points = []
        for size in sizes:
            _, moved = make(size)
            run = out_of_cache(functools.partial(_only_run, make, size), moved)
            points.append((moved, timer.seconds(run, share / len(sizes))))
        trial = {**three_segments(points[::2]), "points": points[::2]}
        answers = [_movement_seconds(trial, moved) for moved, _ in points[1::2]]
        held[f"movement {kind}"] = error_of([time for _, time in points[1::2]], answers)
        curves[kind] = {**three_segments(points), "points": points, "floor": 0.0, "derived": ""}
    for kind in MOVEMENTS:
        if kind not in curves:
            curves[kind] = {**curves["elementwise"], "derived": "an elementwise operator's; not measured"}
    return curves["elementwise"]["rate"], curves, held


def _only_run(make: Callable[[int], tuple[Callable[[], object], int]], size: int) -> Callable[[], object]:
    return make(size)[0]


def _movement_seconds(curve: dict[str, Any], moved: float) -> float:
    return MovementCurve.read({**curve, "floor": 0.0}).seconds(moved)


def _movement_kinds(device: str, largest: int) -> dict[str, Callable[[int], tuple[Callable[[], object], int]]]:
    """Return for each kind a factory of a run over a number of elements, and the bytes that it moves."""
    item = ITEM_BYTES["float32"]
    noise = torch.randn(largest, device=device)

    def vector(size: int) -> torch.Tensor:
        return noise[:size].clone()

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

    def optimizer(size: int) -> tuple[Callable[[], object], int]:
        groups = [[vector(size)], [vector(size)], [vector(size)], [vector(size).abs()]]
        count = [torch.ones((), device=device)]

        def run() -> None:
            fused_adamw_(
                *groups[:2], groups[2], groups[3], [], count,
                lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip

        return run, 7 * item * size

    def fill(size: int) -> tuple[Callable[[], object], int]:
        return lambda: torch.zeros(size, device=device), item * size

    return {
        "elementwise": elementwise, "reduction": reduction, "copy": copy, "softmax": softmax,
        "normalisation": normalisation, "embedding": embedding, "fill": fill, "optimizer": optimizer,
    }  # fmt: skip


def three_segments(points: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Fit the line of the dissertation's section 4.4 to pairs of bytes and seconds, in order of size.

    The third segment's rate is that of the largest size. The two breakpoints are tried at every pair of measured sizes;
    the slopes between them follow from continuity and least squares; the fit with the least absolute logarithmic error
    is used.
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


def error_of(measured: Sequence[float], predicted: Sequence[float]) -> dict[str, Any]:
    """Return the number of measurements, and the median, mean and 90th percentile of |predicted/measured - 1|."""
    if not measured:
        return {"rows": 0}
    errors = sorted(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True))
    return {
        "rows": len(errors),
        "median": round(statistics.median(errors), 4),
        "mean": round(statistics.fmean(errors), 4),
        "p90": round(errors[int(0.9 * (len(errors) - 1))], 4),
    }
