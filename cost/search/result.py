"""Result of a search, complete or so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from legoai.cost.search.buckets.solved import Bucketings
from legoai.cost.search.candidates import Choices, Evaluated
from legoai.cost.search.joint.decision import JointAnswers
from legoai.dsl.diagnostics.diagnostic import Diagnostic

Status = Literal["optimal", "bounded", "time_limit", "interrupted", "infeasible"]
Progress = Callable[[int, float | None, float | None], None]
"""Called with the number of evaluated candidates, the best objective and its bound; None where there is none yet."""


@dataclass(slots=True, kw_only=True)
class SearchResult:
    """What a search found.

    Attributes:
        status: `optimal` where nothing better is left, `bounded` where only splits into stages, buckets, styles or
            divisions of blocks are that were not tried, or candidates without figures, `infeasible` where no candidate
            is feasible.
        best: the best feasible candidate.
        bound: no feasible candidate has a better objective; None where nothing is known.
        evaluated: every candidate that was evaluated, in that order.
        total: all answers that there are.
        refused: of these, those that lint's rules refuse, by the code of the first error.
        bounded: of these, those that a bound excludes.
        left_out: of these, those with other styles than those that were tried.
        failed: candidates without figures, and why.
        errors: an error for each code of ``refused``, the first that was met.
        bucketings: what was solved for by what an evaluated candidate was observed to take.
        joint: joint answers of the holes that decide memory, by those of the others.
        untried: whether no bound excludes some splits into stages, buckets, styles or divisions of blocks that were not
            tried, where nothing that was tried is feasible.
    """

    status: Status = "optimal"
    best: Evaluated | None = None
    bound: float | None = None
    evaluated: list[Evaluated] = field(default_factory=list)
    total: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    bounded: int = 0
    left_out: int = 0
    failed: list[tuple[Choices, str]] = field(default_factory=list)
    errors: dict[str, Diagnostic] = field(default_factory=dict)
    bucketings: dict[Choices, list[Bucketings]] = field(default_factory=dict)
    joint: dict[Choices, JointAnswers] = field(default_factory=dict)
    untried: bool = False
