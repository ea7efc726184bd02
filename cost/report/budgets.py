"""Diagnostics of violated requirements: the excess, and the largest contributor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from legoai.cost import words
from legoai.cost.estimate import Estimate, RankEstimate
from legoai.cost.machine.cluster import Machine
from legoai.cost.report.causes import Cause, Causes
from legoai.cost.report.holders import causes_of_categories
from legoai.cost.report.parts import BUBBLE, COMMUNICATION, COMPUTATION, parts
from legoai.cost.requirements import RequirementResult
from legoai.dsl.diagnostics.codes.budgets import MemoryLeftByRecomputation, OutOfMemory, RequirementViolated
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.specs.directives.checkpoint import Full
from legoai.specs.directives.require import METRICS

_FREE: Final = 0.5
"""Free share of the device's memory above which less recomputation is advised: see the page of LP828."""

_RECOMPUTED: Final = 0.05
"""Share of the step above which recomputation is worth advice."""


class Contributor(NamedTuple):
    """The largest contribution to a figure: a description, and the plan's line that causes it."""

    words: str
    cause: Cause | None


def violations(estimate: Estimate, causes: Causes) -> Iterator[Diagnostic]:
    """Yield a diagnostic for each violated requirement, and one if the device's memory does not suffice."""
    for item in estimate.requirements:
        if not item.ok:
            yield _budget(item, estimate, causes)
    if estimate.fits is False:
        yield _memory(estimate, causes)


def advice(estimate: Estimate, causes: Causes) -> Iterator[Diagnostic]:
    """Yield a diagnostic for the first rule of full recomputation, if half of every device's memory is free."""
    rules = causes.plan.checkpoint.rules if causes.plan.checkpoint is not None else ()
    rule = next((rule for rule in rules if isinstance(rule.treatment, Full)), None)
    fullest = _fullest_device(estimate).use
    if rule is None or fullest.capacity is None or estimate.recompute < _RECOMPUTED * estimate.step_time:
        return
    free = fullest.capacity - fullest.total
    if free < _FREE * fullest.capacity:
        return
    assert rule.origin.span is not None, "a rule is always written by a person"
    yield MemoryLeftByRecomputation.at(
        rule.origin.span,
        f"{words.share(estimate.recompute / estimate.step_time)} of the step is recomputation, and the fullest rank "
        f"leaves {words.size(free)} of {words.size(fullest.capacity)} free",
        label="recomputes the whole module",
        help=[
            f"keep the outputs of the expensive operators: `{rule.path} = selective([attention, matmul])`",
            f"or recompute fewer modules, such as every second: `{rule.path} = every(2)`",
        ],
    )


def _budget(item: RequirementResult, estimate: Estimate, causes: Causes) -> Diagnostic:
    required = item.requirement
    limit, value = (words.bound(figure, required.dimension) for figure in (required.bound, item.value))
    over = item.value - required.bound
    by = words.bound(abs(over), required.dimension)
    relative = f" ({words.share(abs(over) / required.bound)})" if required.bound else ""
    if required.dimension == "fraction":
        by, relative = f"{100 * abs(over):.1f} percentage points", ""
    found = contributor(required.metric, estimate, causes)
    return RequirementViolated.at(
        required.origin.written,
        f"`{required.metric}` is {value}, {by} {'more' if over > 0 else 'less'} than the {limit} of the budget",
        label=f"violated by {by}{relative}",
        others=_others(found),
        help=[f"largest contributor: {found.words}{_place(found)}"],
    )


def _memory(estimate: Estimate, causes: Causes) -> Diagnostic:
    item = _fullest_device(estimate)
    use = item.use
    assert use.fits is False and use.capacity is not None
    found = _of_memory(item, causes)
    outside = f" and {words.size(sum(use.outside.values()))} outside of PyTorch" if use.outside else ""
    span = causes.analysis.span_of(causes.plan.cluster)
    return OutOfMemory.at(
        span,
        f"rank {item.rank} needs {words.size(use.reserved)}{outside}, and `{estimate.machine.device.name}` has "
        f"{words.size(use.capacity)}",
        label=f"short of {words.size(use.total - use.capacity)}",
        others=_others(found),
        help=[f"largest contributor: {found.words}{_place(found)}", *by_segments(item, estimate.machine)],
    )


def _fullest_device(estimate: Estimate) -> RankEstimate:
    """The rank that takes most of its device; the one with most active memory may reserve less than another."""
    return max(estimate.ranks, key=lambda item: item.use.total)


def by_segments(item: RankEstimate, machine: Machine) -> list[str]:
    """Return advice where a rank exceeds its memory because of what its allocator reserves beyond active memory."""
    use, active = item.use, item.memory.peak
    if use.fits is not False or use.capacity is None or machine.expandable_segments:
        return []
    if machine.device.kind == "cpu" or active + use.workspace + sum(use.outside.values()) > use.capacity:
        return []
    return ["what is active fits; `allocator (expandable_segments = true)` mostly reserves less beyond it"]


def _others(found: Contributor) -> list[Label]:
    span = found.cause.origin.span if found.cause is not None else None
    return [Label(span, found.words)] if span is not None else []


def _place(found: Contributor) -> str:
    return f" ({found.cause.words}, {found.cause.place})" if found.cause is not None else ""


def contributor(metric: str, estimate: Estimate, causes: Causes) -> Contributor:
    """Return the largest contribution to a figure of the plan."""
    assert metric in METRICS, metric
    if metric == "peak_memory":
        return _of_memory(estimate.fullest, causes)
    if metric == "reserved_memory":
        return _of_memory(max(estimate.ranks, key=lambda item: item.use.reserved), causes)
    if metric == "bubble":
        return Contributor("waiting for other stages", causes.of_part(BUBBLE))
    if metric == "recompute":
        again = max(causes.modules(estimate.slowest), key=lambda module: module.recompute)
        text = f"{words.path(again.pattern)}, {words.seconds(again.recompute)} recomputed"
        return Contributor(text, causes.of_module(again)[-1])
    if metric == "exposed_comm" and causes.collectives(estimate.slowest):
        return _collective(estimate, causes)
    slowest = causes.modules(estimate.slowest)[0]
    outside = {part: seconds for part, seconds in parts(estimate).items() if part != COMPUTATION}
    part = max(outside, key=lambda name: outside[name])
    if outside[part] <= slowest.seconds:
        text = f"{words.path(slowest.pattern)}, {words.seconds(slowest.seconds)}"
        return Contributor(text, causes.of_module(slowest)[0])
    if part == COMMUNICATION and causes.collectives(estimate.slowest):
        return _collective(estimate, causes)
    return Contributor(f"{part}, {words.seconds(outside[part])}", causes.of_part(part))


def _of_memory(item: RankEstimate, causes: Causes) -> Contributor:
    category, size = next(iter(item.memory.by_category.items()))
    cause = next(iter(causes_of_categories(item.memory, causes)[category]))
    return Contributor(f"{words.CATEGORIES[category]}, {words.size(size)}", cause)


def _collective(estimate: Estimate, causes: Causes) -> Contributor:
    first = causes.collectives(estimate.slowest)[0]
    text = (
        f"{first.count} {first.kind} on {first.axis or 'other ranks'} for {words.path(first.pattern)}, "
        f"{words.seconds(first.exposed)} exposed"
    )
    return Contributor(text, causes.of_collective(first))
