"""Operators of checkpointed modules: those whose outputs are saved, and those that are recomputed."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from legoai.cost.estimate import RankEstimate
from legoai.cost.memory.storages import LiveStorage
from legoai.cost.report.causes import Cause, Causes
from legoai.cost.timing.breakdown import pattern_of
from legoai.dsl.analysis.computation.checkpoint import recomputed_modules
from legoai.dsl.analysis.facts import of_innermost


@dataclass(frozen=True, slots=True)
class SavedOutputs:
    """Outputs of an operator in equal checkpointed modules that are held at the peak.

    Attributes:
        pattern: the modules' path, with numbers written as `*`.
        modules: their number.
        op: the operator.
        bytes: of all of them.
        cause: the rule that decides what these modules save.
    """

    pattern: str
    modules: int
    op: str
    bytes: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class RecomputedCalls:
    """Calls of an operator in equal modules that a step recomputes.

    Attributes:
        pattern: the modules' path, with numbers written as `*`.
        modules: their number.
        op: the operator.
        calls: that are recomputed.
        of: calls in forward.
        seconds: of recomputing them.
        cause: the rule that decides what these modules save.
    """

    pattern: str
    modules: int
    op: str
    calls: int
    of: int
    seconds: float
    cause: Cause


def saved_outputs(rank: RankEstimate, causes: Causes) -> tuple[SavedOutputs, ...]:
    """Return what checkpointed modules save, as far as it is held at the peak of a rank; most bytes first."""
    recomputing = recomputed_modules(causes.analysis)
    found: defaultdict[tuple[str, str], list[LiveStorage]] = defaultdict(list)
    for storage in rank.memory.live:
        made_in_forward = storage.phase == "forward" and storage.category == "activation"
        if made_in_forward and of_innermost(storage.module, recomputing) is not None:
            found[pattern_of(storage.module), storage.op].append(storage)
    rows = (
        SavedOutputs(
            pattern=pattern,
            modules=len({storage.module for storage in storages}),
            op=op,
            bytes=sum(storage.bytes for storage in storages),
            cause=causes.of_memory("activation", storages[0].module),
        )
        for (pattern, op), storages in found.items()
    )
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.pattern, row.op)))


def recomputed_calls(rank: RankEstimate, causes: Causes) -> tuple[RecomputedCalls, ...]:
    """Return what a rank recomputes in a step; longest first."""
    rows = (
        RecomputedCalls(
            pattern=item.pattern,
            modules=item.modules,
            op=each.op,
            calls=each.calls,
            of=each.of,
            seconds=each.seconds,
            cause=causes.of_memory("activation", item.first),
        )
        for item in rank.breakdown.modules
        for each in item.recomputed
    )
    return tuple(sorted(rows, key=lambda row: (-row.seconds, row.pattern, row.op)))
