"""Display names and number formats of an estimate's figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from legoai.cost.trace.records import Category
from legoai.specs.units import BYTES, SECONDS, counted, unit_of

CATEGORIES: Final[dict[Category, str]] = {
    "parameter": "parameters",
    "sharded_parameter": "sharded parameters",
    "unsharded_parameter": "unsharded parameters",
    "gradient": "gradients",
    "sharded_gradient": "sharded gradients",
    "unsharded_gradient": "unsharded gradients",
    "activation": "activations",
    "temporary": "activation gradients",
    "optimizer_state": "optimizer state",
    "input": "inputs",
    "communication": "communication buffers",
    "other": "other",
}
"""Categories of memory, in stacking order."""

OUTSIDE: Final = {"cuda_context": "CUDA context", "nccl": "NCCL buffers"}
"""Device memory that PyTorch's allocator does not manage."""

KINDS: Final = {
    "matrix product": "matrix products",
    "attention": "attention",
    "elementwise": "elementwise",
    "reduction": "reductions",
    "normalisation": "normalisation",
    "softmax": "softmax",
    "embedding": "embedding and indexing",
    "copy": "device copies",
    "fill": "fills",
    "optimizer": "optimizer",
    "loss": "loss",
}

_NANOSECOND: Final = 1e-9


def seconds(value: float) -> str:
    """Three digits: `9.30 s`, `280 ms`, `13.9 us`."""
    unit, size = unit_of(value, SECONDS, ".0f")
    return f"{_three(value / size)} {unit}" if value else "0 s"


def size(count: float) -> str:
    """Return bytes in a binary unit: `30.8 GiB`."""
    unit, base = unit_of(count, BYTES, ".0f")
    return f"{count:.0f} B" if base == 1 else f"{_three(count / base)} {unit}"


def share(value: float) -> str:
    """A percentage: `41.2%`."""
    return f"{100 * value:.1f}%"


def path(pattern: str) -> str:
    """Return the displayed path of a module; the model itself is `root`."""
    return pattern or "root"


def operator(op: str) -> str:
    """Return the displayed name of an operator: without `aten`, in which most of them are."""
    return op.removeprefix("aten.")


def calls(count: int, of: int) -> str:
    """Return how many of an operator's calls are meant: `64 calls`, `8 of 64 calls`."""
    return counted(count, "call") if count == of else f"{count:,} of {counted(of, 'call')}"


def bound(value: float, dimension: str) -> str:
    """Return the value of a figure in its dimension."""
    if dimension == "bytes":
        return size(value)
    if dimension == "seconds":
        return seconds(value)
    return share(value) if dimension == "fraction" else f"{value:,.0f}"


def signed(value: float, shown: Callable[[float], str]) -> str:
    """Return a difference with its sign, `0` if it is rounding error."""
    if abs(value) < _NANOSECOND:
        return "0"
    return f"+{shown(value)}" if value > 0 else shown(value).replace("-", "−", 1)


def signed_share(value: float, whole: float, shown: Callable[[float], str]) -> str:
    """Return a difference with its sign, and its share of a whole: `−120 ms (−3.1%)`."""
    text = signed(value, shown)
    return text if text == "0" else f"{text} ({100 * value / whole:+.1f}%)".replace("-", "−")


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows with aligned cells; of several columns, all but the first are numbers."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    numbers = len(widths) > 2
    return [
        "  ".join(
            f"{cell:>{width}}" if numbers and column else f"{cell:<{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _three(value: float) -> str:
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:,.{digits}f}"
