"""`require`, `minimize` and `maximize`: the budgets that a plan keeps and the figure that it is solved for."""

from __future__ import annotations

from typing import Final, Literal

from legoai.specs.record import Record
from legoai.specs.span import DEFAULT, Origin
from legoai.specs.units import Dimension, format_exactly


class Metric(Record):
    """A figure that the simulator reports: the units in which it may be bounded, and its meaning."""

    dimensions: tuple[Dimension, ...]
    doc: str
    better: Literal["less", "more"]

    def dimension_of(self, bound: float, dimension: str) -> Dimension | None:
        """Return the dimension of a bound; None where the figure has no such. A plain number up to 1 is a fraction."""
        if dimension == "number" and 0 <= bound <= 1 and "fraction" in self.dimensions:
            return "fraction"
        return next((legal for legal in self.dimensions if legal == dimension), None)


METRICS: Final[dict[str, Metric]] = {
    "peak_memory": Metric(("bytes",), "Peak active memory of the fullest device.", "less"),
    "reserved_memory": Metric(
        ("bytes",), "Peak memory that the caching allocator reserves, on the fullest device.", "less"
    ),
    "step_time": Metric(("seconds",), "Time of one optimizer step.", "less"),
    "exposed_comm": Metric(
        ("fraction", "seconds"), "Communication that no computation hides, of the step or in seconds.", "less"
    ),
    "recompute": Metric(
        ("fraction", "seconds"), "Time spent on recomputing activations, of the step or in seconds.", "less"
    ),
    "bubble": Metric(("fraction",), "Share of the step in which a pipeline rank waits.", "less"),
    "mfu": Metric(("fraction",), "Model FLOPs utilisation.", "more"),
    "tokens_per_s": Metric(("number",), "Tokens per second and device; samples, where these are no text.", "more"),
}

MEMORY_METRICS: Final = ("peak_memory", "reserved_memory")
"""The figures of a device's memory: its active bytes, and the bytes that the allocator reserves for them."""

COMPARISONS: Final = ("<=", "<", ">=", ">", "==")


class Requirement(Record, kw_only=True):
    """A bound on one figure: ``require peak_memory <= 72GiB``.

    ``bound`` is in bytes, seconds, or a fraction of the step, according to ``dimension``.
    """

    metric: str
    comparison: str
    bound: float
    dimension: Dimension
    origin: Origin = DEFAULT

    @property
    def key(self) -> tuple[str, str, str]:
        """What it bounds: a figure, from one side and in one dimension. A plan has at most one requirement of a key."""
        return self.metric, self.comparison[0], self.dimension

    @property
    def limit(self) -> str:
        """The comparison and the bound as a plan writes them: ``<= 72GiB``."""
        return f"{self.comparison} {format_exactly(self.bound, self.dimension)}"

    @property
    def bounds_above(self) -> bool:
        """Whether figures greater than the bound are excluded."""
        return self.comparison in ("<=", "<", "==")

    @property
    def bounds_below(self) -> bool:
        """Whether figures less than the bound are excluded."""
        return self.comparison in (">=", ">", "==")

    @property
    def limits_memory(self) -> bool:
        """Whether it bounds from above how much memory of a device is used."""
        return self.metric in MEMORY_METRICS and self.bounds_above


class Objective(Record, kw_only=True):
    """The figure that solving minimises or maximises."""

    direction: Literal["minimize", "maximize"]
    metric: str
    origin: Origin = DEFAULT
