"""Measured rates of memory-bound kernels on this machine."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812

from legoai.cost.calibration.timing import CACHE_BYTES, Budget, Timer, out_of_cache
from legoai.cost.kernels.roofline import MovementCurve
from legoai.runtime.torch_internals.operators import foreach_copy_, foreach_norm, fused_adamw_
from legoai.specs.dtypes import ITEM_BYTES

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

Tensors: TypeAlias = list[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving:
    """A memory-bound kernel to be measured.

    Attributes:
        bytes: that it moves.
        make: allocates operands.
        run: computes from what the run before returned, and from operands.
        follows: whether what the run before returned is an operand, as where a kernel continues with the result of the
            one before it, which a GPU's cache may hold. A CPU's cores share too little cache for that.
    """

    bytes: int
    make: Callable[[], Tensors]
    run: Callable[[torch.Tensor | None, Tensors], object]
    follows: bool = False


def movements(
    timer: Timer, seconds: float, progress: Callable[[str], None]
) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """Return the bandwidth of the largest size, a three-segment line for each kind, and errors on every other size."""
    budget = Budget.of(seconds)
    largest = _LARGEST[timer.device]
    curves: dict[str, Any] = {}
    held: dict[str, Any] = {}
    kinds = _cpu_kinds() if timer.device == "cpu" else _gpu_kinds(timer.device)
    for index, (kind, make) in enumerate(kinds.items()):
        progress(f"movement, {kind}")
        share = budget.left() / (len(kinds) - index)
        sizes = [2**power for power in range(8, int(math.log2(largest)) + 1)]
        points = []
        for size in sizes:
            moving = make(size)
            run = (
                _following(moving) if moving.follows else out_of_cache(functools.partial(_alone, moving), moving.bytes)
            )
            points.append((moving.bytes, timer.seconds(run, share / len(sizes))))
        trial = {**three_segments(points[::2]), "points": points[::2]}
        answers = [_movement_seconds(trial, moved) for moved, _ in points[1::2]]
        held[f"movement {kind}"] = error_of([time for _, time in points[1::2]], answers)
        curves[kind] = {**three_segments(points), "points": points, "floor": 0.0, "derived": ""}
    for kind in MOVEMENTS:
        if kind not in curves:
            curves[kind] = {**curves["elementwise"], "derived": "an elementwise operator's; not measured"}
    return curves["elementwise"]["rate"], curves, held


def _alone(moving: Moving) -> Callable[[], object]:
    return functools.partial(moving.run, None, moving.make())


def _following(moving: Moving) -> Callable[[], object]:
    """Return a run on the result of the run before, whose other operands and whose result are in no cache."""
    sets = max(2, math.ceil(CACHE_BYTES / moving.bytes))
    operands = itertools.cycle([moving.make() for _ in range(min(sets, _MOST_SETS))])
    results: deque[Any] = deque(maxlen=sets)
    results.append(moving.make()[0])

    def run() -> object:
        results.append(moving.run(results[-1], next(operands)))
        return results[-1]

    for _ in range(sets):
        run()
    return run


_LARGEST: Final = {"cpu": 2**24, "cuda": 2**28}
"""Elements of the largest kernel, by device."""
_MOST_SETS: Final = 512
_WIDTH: Final = 4096
"""Features of a token."""
_ROWS_OF_TOKEN: Final = 4
"""Rows of an embedding for each token of a batch, of which a backward writes the gradient."""
_VOCABULARY: Final = 32768
"""Rows of an embedding, and entries of a loss's softmax."""
_LISTED: Final = 8
"""Tensors of a list: about as many as a decoder's block has parameters, which FSDP copies together."""


def _movement_seconds(curve: dict[str, Any], moved: float) -> float:
    return MovementCurve.read({**curve, "floor": 0.0}).seconds(moved)


def _cpu_kinds() -> Mapping[str, Callable[[int], Moving]]:
    """Return for each kind a kernel over a number of elements, in fp32."""
    item = ITEM_BYTES["float32"]
    drawn = torch.randn(_LARGEST["cpu"])  # once: that takes ten times as long as a copy

    def noise(size: int) -> torch.Tensor:
        return drawn[:size].clone()

    def rows(size: int) -> torch.Tensor:
        return noise(size).view(-1, min(size, 1024))

    def table(size: int) -> Tensors:
        width = min(size, 256)
        return [torch.randint(1024, (size // width,)), noise(1024 * width).view(-1, width)]

    def moving(passes: int, make: Callable[[int], Tensors], run: Callable[[Tensors], object]) -> Any:
        return lambda size: Moving(bytes=passes * item * size, make=lambda: make(size), run=lambda _, held: run(held))

    return {
        "elementwise": moving(3, lambda size: [noise(size), noise(size)], lambda held: torch.add(*held)),
        "reduction": moving(1, lambda size: [noise(size)], lambda held: held[0].sum()),
        "copy": moving(2, lambda size: [noise(size)], lambda held: held[0].clone()),
        "copy foreach": moving(2, lambda size: _copied(noise(size), torch.float32), _copy_listed),
        "reduction foreach": moving(1, lambda size: list(noise(size).chunk(_LISTED)), foreach_norm),
        "softmax": moving(2, lambda size: [rows(size)], lambda held: torch.softmax(held[0], -1)),
        "normalisation": moving(2, lambda size: [rows(size)], lambda held: F.layer_norm(held[0], held[0].shape[-1:])),
        "embedding": moving(2, table, lambda held: F.embedding(held[0], held[1])),
        "fill": moving(1, lambda size: [noise(size)], lambda held: torch.zeros(held[0].shape)),
        "optimizer": moving(7, lambda size: _state(size, noise), _update),
    }


def _state(size: int, noise: Callable[[int], torch.Tensor]) -> Tensors:
    """Return a parameter, its gradient, its moments and the number of steps."""
    values = [noise(size) for _ in range(4)]
    return [*values[:3], values[3].abs_(), torch.ones((), device=values[3].device)]


def _copied(values: torch.Tensor, dtype: torch.dtype) -> Tensors:
    """Return a list of tensors, followed by those of another dtype to which they are copied."""
    return [*values.chunk(_LISTED), *torch.empty_like(values, dtype=dtype).chunk(_LISTED)]


def _copy_listed(held: Tensors) -> None:
    foreach_copy_(held[_LISTED:], held[:_LISTED])


def _update(held: Tensors) -> None:
    fused_adamw_(
        *([one] for one in held[:4]), [], [held[4]],
        lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


def _gpu_kinds(device: str) -> Mapping[str, Callable[[int], Moving]]:
    """Return for each kind, and each form of one, a kernel over a number of elements, in bf16 as in training.

    Losses are computed in fp32. A GPU's cache holds what was just written; saved activations and parameters are not in
    it. An operand that the kernel before wrote is therefore the result of the run before.
    """
    half, full = ITEM_BYTES["bfloat16"], ITEM_BYTES["float32"]

    def noise(size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=dtype)

    def rows(size: int) -> torch.Tensor:
        return noise(size).view(-1, min(size, _WIDTH))

    def entries(size: int, length: int) -> torch.Tensor:
        return noise(size, torch.float32).view(-1, min(size, length))

    def elementwise(size: int) -> Moving:
        return Moving(
            bytes=3 * half * size, make=lambda: [noise(size)], follows=True,
            run=lambda last, held: torch.add(last, held[0], alpha=0.5),  # type: ignore[arg-type]
        )  # fmt: skip

    def unvectorised(size: int) -> Moving:
        shape = (-1, min(size, 128))
        return Moving(
            bytes=2 * half * size, make=lambda: [noise(size).view(shape), noise(min(size, 128)).view(1, -1)],
            follows=True, run=lambda last, held: torch.mul(last, held[1]),  # type: ignore[arg-type]
        )  # fmt: skip

    def normalisation(size: int) -> Moving:
        return Moving(
            bytes=2 * half * size, make=lambda: [rows(size)], follows=True,
            run=lambda last, held: F.rms_norm(last, held[0].shape[-1:]),  # type: ignore[arg-type]
        )  # fmt: skip

    def normalisation_backward(size: int) -> Moving:
        def make() -> Tensors:
            x, weight = rows(size), noise(min(size, _WIDTH))
            x.requires_grad_()
            weight.requires_grad_()
            return [noise(size).view(x.shape), x, weight, F.rms_norm(x, x.shape[-1:], weight)]

        def run(last: torch.Tensor | None, held: Tensors) -> object:
            return torch.autograd.grad(held[3], held[1:3], last, retain_graph=True)[0]

        return Moving(bytes=3 * half * size, make=make, run=run, follows=True)

    def softmax(size: int, length: int = _WIDTH) -> Moving:
        return Moving(
            bytes=2 * full * size, make=lambda: [entries(size, length)], follows=True,
            run=lambda last, held: torch.log_softmax(last, -1),  # type: ignore[arg-type]
        )  # fmt: skip

    def softmax_backward(size: int, length: int = _WIDTH) -> Moving:
        def make() -> Tensors:
            x = entries(size, length).requires_grad_()
            return [noise(size, torch.float32).view(x.shape), x, torch.log_softmax(x, -1)]

        def run(last: torch.Tensor | None, held: Tensors) -> object:
            return torch.autograd.grad(held[2], held[1], last, retain_graph=True)[0]

        return Moving(bytes=3 * full * size, make=make, run=run, follows=True)

    def tokens(size: int) -> torch.Tensor:
        return torch.randint(_VOCABULARY, (max(1, size // _WIDTH),), device=device)

    def embedding(size: int) -> Moving:
        table = noise(_VOCABULARY * min(size, _WIDTH)).view(_VOCABULARY, -1)
        return Moving(
            bytes=2 * half * size, make=lambda: [tokens(size)], run=lambda _, held: F.embedding(held[0], table)
        )

    def embedding_backward(size: int) -> Moving:
        def make() -> Tensors:
            found = tokens(size)
            return [found, noise(size).view(found.numel(), -1)]

        def run(_: torch.Tensor | None, held: Tensors) -> object:
            rows = _ROWS_OF_TOKEN * held[0].numel()
            return torch.ops.aten.embedding_dense_backward(held[1], held[0] % rows, rows, -1, False)

        return Moving(bytes=(1 + _ROWS_OF_TOKEN) * half * size, make=make, run=run)

    def alone(passes: int, item: int, make: Callable[[int], Tensors], run: Callable[[Tensors], object]) -> Any:
        return lambda size: Moving(bytes=passes * item * size, make=lambda: make(size), run=lambda _, held: run(held))

    return {
        "elementwise": elementwise,
        "unvectorised": unvectorised,
        "reduction": alone(1, half, lambda size: [rows(size)], lambda held: held[0].sum(0)),
        "copy": alone(2, half, lambda size: [noise(size)], lambda held: held[0].clone()),
        "copy unvectorised": lambda size: Moving(
            bytes=(half + full) * size, make=lambda: [noise(size)], run=lambda _, held: held[0].float()
        ),
        "copy foreach": alone(
            1, half + full, lambda size: _copied(noise(size, torch.float32), torch.bfloat16), _copy_listed
        ),
        "reduction foreach": alone(
            1, full, lambda size: list(noise(size, torch.float32).chunk(_LISTED)), foreach_norm
        ),
        "softmax": softmax,
        "softmax backward": softmax_backward,
        "softmax long": functools.partial(softmax, length=_VOCABULARY),
        "softmax long backward": functools.partial(softmax_backward, length=_VOCABULARY),
        "normalisation": normalisation,
        "normalisation backward": normalisation_backward,
        "embedding": embedding,
        "embedding backward": embedding_backward,
        "fill": alone(1, half, lambda size: [noise(size)], lambda held: torch.zeros_like(held[0])),
        "optimizer": alone(7, full, lambda size: _state(size, lambda size: noise(size, torch.float32)), _update),
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
