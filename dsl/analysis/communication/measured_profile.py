"""Profile of a traced step that the first steps of a run measure, and the passes that read it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.communication.compiler_buckets import compiler_rule
from legoai.dsl.analysis.communication.node_times import unpriced
from legoai.dsl.analysis.communication.timed_overlap import overlaps_by_time
from legoai.dsl.analysis.parallelism.graph import is_traced, unshards_selectively
from legoai.dsl.analysis.stages.pipeline import is_staged
from legoai.dsl.analysis.unsupported import Unsupported
from legoai.specs.directives.comm import Proactive
from legoai.specs.directives.optimizer import Muon
from legoai.specs.plan import Plan

_STATEMENT: Final = "`profile = measured`"
_LEAVE_OUT: Final = "leave `profile` out"
_READERS: Final = (
    "write what reads it: `bucket(compiler)`, `reorder = by_time`, `unshard = selective`, `offload` with `adaptive`, "
    "or `prefetch = proactive(…)` with `require peak_memory`"
)

_NOT_TRACED: Final = (
    "name", "comm", "offload", "allocator", "optimizer", "clip", "schedule",
    "data", "weights", "steps", "seed", "save", "evaluate", "memory_limit",
)  # fmt: skip
"""Statements that change neither the traced graph of a step nor what its nodes take: passes over it, and what is not in
it. All others are taken to change it."""


def digest_of_traced(plan: Plan) -> str:
    """Return the digest of the parts of a plan that decide how its step is traced: the identity of its profile.

    Estimates read a profile before anything is traced. A run compares the graph itself with the profile's.
    """
    body = {keyword: value for keyword, value in plan.canonical().items() if keyword not in _NOT_TRACED}
    algorithm = plan.optimizer.algorithm
    # Measured memory is stored as what exceeds the values and the optimizer's state, of which a rule decides how much.
    body["state"] = [
        algorithm.name,
        bool(getattr(algorithm, "momentum", 0.0)),
        sorted(rule.path for rule in plan.optimizer.rules if isinstance(rule.treatment, Muon)),
    ]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def is_measured(analysis: Analysis) -> bool:
    """Whether the first steps of a run measure the profile that passes over the graph read."""
    comm = analysis.plan.comm
    return comm is not None and bool(comm.profile == "measured")


def prefetches_within_memory(analysis: Analysis) -> bool:
    """Whether gathers are moved ahead only where device memory allows it."""
    comm = analysis.plan.comm
    if comm is None or not isinstance(comm.prefetch, Proactive) or not is_traced(analysis):
        return False
    return analysis.plan.memory_limit is not None


def is_read(analysis: Analysis) -> bool:
    """Whether a pass over the graph of a step decides by times of operators, or by the memory curve."""
    if not is_traced(analysis) or is_staged(analysis):
        return False
    offload = analysis.plan.offload
    return (
        compiler_rule(analysis) is not None
        or overlaps_by_time(analysis)
        or unshards_selectively(analysis)
        or prefetches_within_memory(analysis)
        or (offload is not None and offload.observes_memory_limit)
    )


def supports(analysis: Analysis) -> Iterator[Unsupported]:
    """Yield a profile that a pass reads, where times of the cluster cannot be predicted until it exists."""
    if not is_measured(analysis) or analysis.plan.fsdp is None:
        return
    assert analysis.plan.comm is not None
    place = analysis.span_of(analysis.plan.comm, "profile")
    if not is_traced(analysis):
        why = "it is of the nodes of one traced graph, which the eager backend does not have"
        help: tuple[str, ...] = ("write `backend = graph` in `fsdp`", _LEAVE_OUT)
    elif not is_read(analysis):
        why = "no pass over this graph decides by times or by memory"
        help = (_LEAVE_OUT,) if is_staged(analysis) else (_READERS, _LEAVE_OUT)
    else:
        if compiler_rule(analysis) is None and not overlaps_by_time(analysis):  # which refuse them themselves
            for span, what, unknown in unpriced(analysis):
                why = f"{unknown}, from which times follow until there is one"
                yield Unsupported(span, f"{what} beside {_STATEMENT} is not lowered: {why}", "no times", (_LEAVE_OUT,))
        return
    yield Unsupported(place, f"{_STATEMENT} is not lowered: {why}", "nothing reads it", help)
