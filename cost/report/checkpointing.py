"""Operators of checkpointed modules: those whose outputs are saved, and those that are recomputed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from legoai.cost.estimate import Estimate, RankEstimate
from legoai.cost.memory.storages import LiveStorage
from legoai.cost.report.causes import Cause, Causes
from legoai.cost.timing.breakdown import pattern_of
from legoai.cost.trace.records import PART_OF, Collective, Copy, HostKernel, Kernel
from legoai.cost.trace.segments import Instance
from legoai.dsl.analysis.compilation.graph_breaks import effectively_compiled
from legoai.dsl.analysis.computation.checkpoint import recomputed_modules
from legoai.dsl.analysis.facts import grouped, listed, of_innermost
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.diagnostics.codes.budgets import OperatorNotCalled
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.specs.directives.checkpoint import Selective

_NAME: Final = re.compile(r"\w+\.\w+")
"""Operators in the name of a kernel, which may be several, fused."""


@dataclass(frozen=True, slots=True)
class SavedOutputs:
    """Outputs of an operator in equal modules under one rule of `checkpoint` that are held at the peak.

    Attributes:
        pattern: the modules' path, with numbers written as `*`.
        modules: the number of those that hold some.
        op: the operator.
        bytes: of all of them.
        cause: the rule by which all of these modules recompute.
    """

    pattern: str
    modules: int
    op: str
    bytes: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class RecomputedCalls:
    """Calls of an operator in equal modules under one rule of `checkpoint` that a step recomputes.

    Attributes:
        pattern: the modules' path, with numbers written as `*`.
        modules: the number of those that recompute by the same rule.
        op: the operator.
        calls: that are recomputed.
        of: calls of these modules in forward.
        seconds: of recomputing them.
        cause: the rule by which all of these modules recompute.
    """

    pattern: str
    modules: int
    op: str
    calls: int
    of: int
    seconds: float
    cause: Cause


def saved_outputs(rank: RankEstimate, causes: Causes) -> tuple[SavedOutputs, ...]:
    """Return what checkpointed modules computed in forward and is held at the peak of a rank; most bytes first.

    The trace does not record which module saves a tensor: that may be another one than computed it.
    """
    recomputing = recomputed_modules(causes.analysis)
    found: defaultdict[tuple[str, str, Cause], list[LiveStorage]] = defaultdict(list)
    for storage in rank.memory.live:
        made_in_forward = storage.phase == "forward" and storage.category == "activation"
        if made_in_forward and of_innermost(storage.module, recomputing) is not None:
            cause = causes.of_recomputation(storage.module)
            found[pattern_of(storage.module), storage.op, cause].append(storage)
    rows = (
        SavedOutputs(
            pattern=pattern,
            modules=len({storage.module for storage in storages}),
            op=op,
            bytes=sum(storage.bytes for storage in storages),
            cause=cause,
        )
        for (pattern, op, cause), storages in found.items()
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
            cause=causes.of_recomputation(item.first),
        )
        for item in causes.modules(rank)
        for each in item.recomputed
    )
    return tuple(sorted(rows, key=lambda row: (-row.seconds, row.pattern, row.op)))


def never_called(estimate: Estimate, causes: Causes) -> Iterator[Diagnostic]:
    """Yield a diagnostic for each policy that names operators which no module under it calls.

    Lint knows what words such as `matmul` keep, without a simulation. The kernels of a compiled module, and of modules
    inside of it, do not show which operators its code calls.
    """
    analysis = causes.analysis
    if is_traced(analysis):
        return
    compiled = effectively_compiled(analysis)
    called: dict[str, set[str]] | None = None
    for rule, paths in grouped(recomputed_modules(analysis).items()):
        if not isinstance(rule.treatment, Selective) or any(of_innermost(path, compiled) for path in paths):
            continue
        if called is None:
            called = _called(estimate)
        own = dict.fromkeys(paths, True)
        names = {name for path, found in called.items() if of_innermost(path, own) for name in found}
        named = [name for name in rule.treatment.keep if "." in name]
        idle = [name for name in named if ".".join(name.split(".")[:2]) not in names and _is_idle(name, names)]
        if idle:
            yield OperatorNotCalled.at(
                analysis.span_of(rule.treatment, "keep"),
                f"{listed(idle)} {'keep' if len(idle) > 1 else 'keeps'} nothing: no module of `{rule.path}` calls "
                f"{'them' if len(idle) > 1 else 'it'}",
                label="never called",
                help=["leave it out; `legoai cost` lists what is saved and what runs again, by name"],
            )


def _called(estimate: Estimate) -> dict[str, set[str]]:
    """Return the operators that modules call in forward, and the kinds of their collectives, by path."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for rank in estimate.ranks:
        for item in rank.trace.between(rank.span):
            records = item.segment.records if isinstance(item, Instance) else (item,)
            for record in records:
                if isinstance(record, Kernel | HostKernel | Collective | Copy) and record.phase == "forward":
                    path = item.path(record.module) if isinstance(item, Instance) else record.module
                    found[path].update(_names(record))
    return found


def _names(record: Kernel | HostKernel | Collective | Copy) -> Iterable[str]:
    if isinstance(record, Collective):
        if record.of_parameters:
            return ()
        return ("all_to_all" if record.kind == "permute" else record.kind,)
    if isinstance(record, Copy):
        return ("aten._to_copy",)
    whole = record.attributes.get(PART_OF)
    return _NAME.findall(record.op) if whole is None else (whole,)


def _is_idle(name: str, called: set[str]) -> bool:
    """Whether the trace shows that an operator without a kernel of its name is not called.

    Nothing is recorded of views, and of operators that only reserve memory or wait; of a collective only its kind is.
    """
    from legoai.cost.simulated.operators.properties import (
        UnknownCollective,
        operator,
    )  # import torch, unlike the cached trace
    from legoai.runtime.recomputation.policies import operators

    try:
        known = [operator(item) for item in operators(name)]
    except UnknownCollective:  # the simulation of a call would have failed
        return True
    return all(item.treatment in ("kernel", "copy", "collective") and item.collective not in called for item in known)
