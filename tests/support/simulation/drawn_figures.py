"""Figures of candidates that are drawn or listed instead of simulated."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.evaluation.evaluator import Figures, NoFigures, Outcome, OutOfTimeError
from legoai.dsl.analysis.analysis import Analysis
from legoai.specs.directives.require import METRICS

KEPT = {
    "none": (20, 0.0),
    "selective([attention, matmul])": (15, 1.0),
    "budget(75%)": (14, 1.5),
    "selective([attention, alternate_matmul])": (11, 2.1),
    "budget(50%)": (9, 3.4),
    "selective([attention])": (7, 4.2),
    "budget(25%)": (4, 5.0),
    "full": (1, 7.7),
    "every(2)": (1, 7.7),
    "every(3)": (1, 7.7),
}
"""GiB that a block keeps of a micro batch, and seconds that it recomputes, by its treatment."""


def figures(step_time: float, memory: float, *, fits: bool = True, recompute: float = 0.0) -> Figures:
    metrics = {f"{name} {dimension}": 0.0 for name, metric in METRICS.items() for dimension in metric.dimensions}
    metrics |= {"step_time seconds": step_time, "peak_memory bytes": memory, "reserved_memory bytes": memory}
    metrics["tokens_per_s number"] = 1024 / step_time  # of each of 4 devices
    metrics |= {"recompute fraction": recompute / step_time, "recompute seconds": recompute}
    return Figures(
        metrics=metrics, fits=fits, compute=step_time, recompute=recompute, exposed={}, waiting=0.0, bubble=0.0,
        profile="cpu@0123456789ab",
    )  # fmt: skip


class Drawn:
    """Figures that are drawn for each plan, always above its bounds."""

    def __init__(self, seed: int, *, failing: float = 0.0, tight: bool = False) -> None:
        self.seed = seed
        self.failing = failing
        self.tight = tight
        self.asked = 0
        self.likely: list[Analysis] = []
        self.limit: int | None = None
        self.bounds = BoundsOf()

    @property
    def simulated(self) -> int:
        return self.asked

    def figures(self, analysis: Analysis) -> Outcome:
        draw = random.Random(f"{self.seed} {analysis.plan.digest}")
        least = self.bounds(analysis)
        if draw.random() < self.failing:
            return NoFigures(reason="drawn")
        factor = 1.0 if self.tight else draw.uniform(1.0, 3.0)
        return figures(least.step_time * factor, least.memory * draw.uniform(1.0, 3.0), fits=draw.random() > 0.2)

    def begin_likely(self, candidates: Sequence[Analysis]) -> None:
        self.likely += candidates

    def finished(self, candidates: Sequence[Analysis]) -> list[Outcome | None]:
        return [None for _ in candidates]

    def evaluate(self, candidates: Sequence[Analysis], deadline: float | None) -> Iterator[Outcome]:
        for analysis in candidates:
            if self.limit is not None and self.asked >= self.limit:
                raise OutOfTimeError
            self.asked += 1
            yield self.figures(analysis)
