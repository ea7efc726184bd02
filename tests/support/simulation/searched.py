"""A small plan with holes for tests of the search, its opening, and what a search of it must find."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

from legoai.cost.search.candidate_bounds.bounds import BoundsOf
from legoai.cost.search.evaluation.evaluator import Figures
from legoai.cost.search.objective import Costs, objective_of
from legoai.cost.search.result import SearchResult
from legoai.dsl.lint import lint
from legoai.dsl.open_plan import OpenPlan
from legoai.specs.directives.require import METRICS
from support.simulation.drawn_figures import Drawn

TEXT = """\
plan test
model   llama3("tiny")
cluster cpu(devices = 4)
batch   (global = 32, micro = auto in [2, 8, 16], seq_len = 128)
mesh    (dp_shard = rest, tp = auto)
shard standard on tp (sequence = auto)
fsdp blocks on dp_shard
checkpoint { layers.* = auto in [none, full, every(2)] }
precision (param = fp32, reduce = fp32)
"""

SCHEDULED = """\
plan test
model   llama3("tiny")
cluster cpu(devices = 4)
batch   (global = 32, micro = auto in [1, 2, 4], seq_len = 128)
mesh    (pp = auto, dp_shard = rest)
pipeline on pp (schedule = auto in [GPipe, 1F1B])
fsdp blocks on dp_shard
checkpoint { layers.* = auto in [none, full] }
precision (param = fp32, reduce = fp32)
"""


def opened(text: str = TEXT) -> OpenPlan:
    linted = lint(text, "test.plan", directory=Path())
    assert not linted.has_errors, linted.diagnostics
    return OpenPlan(linted, directory=Path())


def brute_force(plan: OpenPlan, evaluator: Drawn, metric: str, sign: int) -> float | None:
    """The best value of a metric, to be minimised or by a negative ``sign`` maximised, of all candidates."""
    values = []
    for choices in itertools.product(*(range(len(hole.choices)) for hole in plan.holes)):
        candidate = plan.candidate(choices)
        if candidate.errors:
            continue
        found = evaluator.figures(candidate.analysis)
        if isinstance(found, Figures) and found.fits:
            value = found.metric(metric, METRICS[metric].dimensions[0])
            if all(found.metric(item.metric, item.dimension) <= item.bound for item in candidate.plan.require):
                values.append(value)
    return sign * min(sign * value for value in values) if values else None


def bounds_of(plan: OpenPlan, found: SearchResult) -> list[float]:
    """Bounds of the cost of the candidates without figures."""
    costs = Costs(objective_of(plan.resolution.plan.objective), BoundsOf())
    bounded = (costs.bounded(plan.candidate(choices), -math.inf) for choices, _ in found.failed)
    return [one for one in bounded if one is not None]
