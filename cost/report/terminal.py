"""Terminal summary of an estimate."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

from legoai.cost import words
from legoai.cost.estimate import Estimate, RankEstimate
from legoai.cost.report.budgets import by_segments
from legoai.cost.report.causes import Causes
from legoai.cost.report.checkpointing import recomputed_calls, saved_outputs
from legoai.cost.report.holders import causes_of_categories, holders, offloaded
from legoai.cost.report.parts import COMMUNICATION, COMPUTATION, parts
from legoai.cost.requirements import RequirementResult
from legoai.cost.trace.records import Allocate
from legoai.specs.units import counted
from legoai.specs.visible_text import visible_line

_SHOWN: Final = 5
_SMALL: Final = 0.001
"""Share of the step, and of the memory, below which a row is omitted."""

_PART: Final = 0.1
"""Share of a module's memory above which a category, of at most two, is named."""

Row = tuple[str, ...]


def terminal(estimate: Estimate, causes: Causes) -> str:
    """Return the estimate as lines of text, for a terminal of 100 columns or more."""
    blocks = [
        _head(estimate),
        _where(estimate),
        _memory(estimate, causes),
        _holders(estimate, causes),
        _saved(estimate, causes),
        _modules(estimate, causes),
        _recomputed(estimate, causes),
        _collectives(estimate, causes),
        _requirements(estimate),
        _basis(estimate),
    ]
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in map(list, blocks) if block) + "\n"


def title(estimate: Estimate) -> str:
    """Return the plan and its cluster as one line."""
    cluster, device = estimate.machine.cluster, estimate.machine.device
    variant = f", variant {estimate.variant}" if estimate.variant else ""
    hosts = counted(cluster.hosts, "host")
    fabric = f", {cluster.fabric.name}" if cluster.fabric is not None else ""
    return visible_line(f"{estimate.plan}{variant}: {estimate.world_size} x {device.name}, {hosts}{fabric}")


def _head(estimate: Estimate) -> Iterator[str]:
    yield title(estimate)
    yield ""
    speed = f"{estimate.tokens_per_second_per_device:,.0f} {estimate.unit}/s/device"
    rate = f"of {estimate.peak_flops / 1e12:,.4g} TFLOP/s ({estimate.peak_source}); {estimate.flops_convention}"
    yield from _table(
        [
            ("step time", words.seconds(estimate.step_time), speed),
            ("MFU", words.share(estimate.mfu), rate),
            *_hours(estimate),
            *_bubble(estimate),
        ],
        right=(1,),
    )


def _hours(estimate: Estimate) -> Iterator[Row]:
    """The price of a training of tokens; nobody counts images in 10^12."""
    if estimate.unit == "tokens":
        yield "10^12 tokens", f"{estimate.device_hours_per_trillion_tokens:,.0f}", "device-hours"


def _bubble(estimate: Estimate) -> Iterator[Row]:
    if len(estimate.ranks) > 1:
        least, most = (words.share(of(item.bubble for item in estimate.ranks)) for of in (min, max))
        yield "bubble", words.share(estimate.bubble_fraction), f"mean of {len(estimate.ranks)} ranks: {least} to {most}"


def _where(estimate: Estimate) -> Iterator[str]:
    one, total = estimate.slowest.breakdown, estimate.step_time
    kinds = [(words.KINDS.get(kind, kind), took) for kind, took in one.by_kind.items() if took > _SMALL * total]
    kinds.append(("recomputation (included)", one.recompute))
    kinds.append(("slowdown from overlapping communication (included)", one.slowed))
    axes = [(f"on {axis}", took) for axis, took in one.exposed_by_axis.items()]
    inside = {COMPUTATION: kinds, COMMUNICATION: axes}
    rows: list[tuple[str, float]] = []
    for part, seconds in parts(estimate).items():
        rows.append((part, seconds))
        rows += [(f"  {name}", took) for name, took in inside.get(part, ())]
    busiest = f", on rank {estimate.slowest.rank}, the busiest of {len(estimate.ranks)}"
    yield "step time breakdown" + (busiest if len(estimate.ranks) > 1 else "")
    yield from _table(
        [
            (f"  {name}", words.seconds(took), words.share(took / total))
            for name, took in rows
            if name in inside or took > _SMALL * total
        ],
        right=(1, 2),
    )


def _memory(estimate: Estimate, causes: Causes) -> Iterator[str]:
    item = estimate.fullest
    use = item.use
    yield f"memory of rank {item.rank}" + (f", the fullest of {len(estimate.ranks)}" if len(estimate.ranks) > 1 else "")
    rows = [("  peak active", words.size(item.memory.peak), f"in {_where_peak(item)}")]
    by_cause = causes_of_categories(item.memory, causes)
    for category, size in item.memory.by_category.items():
        if size > _SMALL * item.memory.peak:
            rows.append((f"    {words.CATEGORIES[category]}", words.size(size), next(iter(by_cause[category])).place))
    if estimate.machine.device.kind != "cpu":
        rows.append(("  reserved by PyTorch", words.size(use.reserved), _of_reserved(estimate, causes)))
    for name, size in use.outside.items():
        rows.append((f"  {words.OUTSIDE[name]}", words.size(size), ""))
    if use.capacity is not None:
        verdict = {True: "fits", False: "does not fit", None: ""}[use.fits]
        if use.retries and use.fits:
            verdict += (
                f", but only after {use.retries} allocation retries, each of which frees cached memory and stalls"
            )
        rows.append(("  total on the device", f"{words.size(use.total)}", f"of {words.size(use.capacity)}: {verdict}"))
    if estimate.host_memory is not None:
        rows.append(("  offloaded to host memory", *offloaded(estimate.host_memory)))
    yield from _table(rows, right=(1,))
    yield from (f"  {advice}" for advice in by_segments(item, estimate.machine))


def _of_reserved(estimate: Estimate, causes: Causes) -> str:
    """Return the composition of reserved memory, and the line that decides how it is reserved."""
    workspace = estimate.fullest.use.workspace
    said = [f"with {words.size(workspace)} for cuBLAS"] if workspace else []
    if estimate.machine.expandable_segments:
        said.append(f"in expandable segments, {causes.of_segments().place}")
    return ", ".join(said)


def _where_peak(item: RankEstimate) -> str:
    record = item.trace.records[item.memory.peak_record]
    module = f" of {words.path(record.module)}" if isinstance(record, Allocate) else ""
    return f"{item.memory.peak_phase}{module}"


def _holders(estimate: Estimate, causes: Causes) -> Iterator[str]:
    yield "modules with the most memory at the peak"
    rows = []
    for item in holders(estimate.fullest.memory, causes)[:_SHOWN]:
        name = _alike(item.pattern, item.modules)
        two = itertools.islice(item.by_category.items(), 2)
        main = [(words.CATEGORIES[category], size) for category, size in two if size > _PART * item.bytes]
        parts = ", ".join(f"{words.size(size)} {what}" if len(main) > 1 else what for what, size in main)
        rows.append((f"  {name}", words.size(item.bytes), parts, item.causes[0].place))
    yield from _table(rows, right=(1,))


def _saved(estimate: Estimate, causes: Causes) -> Iterator[str]:
    found = saved_outputs(estimate.fullest, causes)
    if found:
        yield "most memory of saved outputs at the peak"
        yield from _table(
            [
                (
                    f"  {_alike(item.pattern, item.modules)}",
                    words.operator(item.op),
                    words.size(item.bytes),
                    item.cause.place,
                )
                for item in found[:_SHOWN]
            ],
            right=(2,),
        )


def _modules(estimate: Estimate, causes: Causes) -> Iterator[str]:
    yield "most expensive modules"
    rows = []
    for item in causes.modules(estimate.slowest)[:_SHOWN]:
        name = _alike(item.pattern, item.modules)
        recomputed = f"{words.seconds(item.recompute)} recomputed" if item.recompute else ""
        why = ", ".join(dict.fromkeys(cause.place for cause in causes.of_module(item)))
        rows.append((f"  {name}", words.seconds(item.seconds), recomputed, why))
    yield from _table(rows, right=(1,))


def _recomputed(estimate: Estimate, causes: Causes) -> Iterator[str]:
    found = recomputed_calls(estimate.slowest, causes)
    if found:
        yield "most expensive recomputation"
        yield from _table(
            [
                (
                    f"  {_alike(item.pattern, item.modules)}",
                    words.operator(item.op),
                    words.seconds(item.seconds),
                    words.calls(item.calls, item.of),
                    item.cause.place,
                )
                for item in found[:_SHOWN]
            ],
            right=(2, 3),
        )


def _alike(pattern: str, modules: int) -> str:
    """Return the path of equal modules, and their number."""
    return words.path(pattern) + (f" ({modules})" if modules > 1 else "")


def _collectives(estimate: Estimate, causes: Causes) -> Iterator[str]:
    found = causes.collectives(estimate.slowest)
    if not found:
        return
    yield "most expensive collectives"
    rows = []
    for item in found[:_SHOWN]:
        what = f"  {item.count} x {item.kind} on {item.axis or 'other ranks'}, {item.phase}"
        cause = causes.of_collective(item)
        rows.append(
            (
                what,
                words.path(item.pattern),
                words.seconds(item.seconds),
                f"{words.seconds(item.exposed)} exposed",
                cause.place if cause is not None else "runtime",
            )
        )
    yield from _table(rows, right=(2, 3))


def _requirements(estimate: Estimate) -> Iterator[str]:
    if not estimate.requirements:
        return
    yield "requirements"
    yield from _table([_requirement(item) for item in estimate.requirements], right=(1,))


def _requirement(item: RequirementResult) -> Row:
    required = item.requirement
    limit = words.bound(required.bound, required.dimension)
    span = required.origin.span
    place = visible_line(f"{span.file}:{span.line}") if span is not None else ""
    value = words.bound(item.value, required.dimension)
    return f"  {required.metric} {required.comparison} {limit}", value, "ok" if item.ok else "violated", place


def _basis(estimate: Estimate) -> Iterator[str]:
    profile = estimate.machine.profile
    models = ", ".join(f"{words.share(share)} {name}" for name, share in estimate.share_by_model.items())
    yield f"time models: {models} (profile {visible_line(profile.name)}, {visible_line(profile.made)}, {profile.hash})"
    for line in estimate.assumptions:
        yield f"assumed: {line}"


def _table(rows: Sequence[Row], *, right: Sequence[int] = ()) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            f"{cell:>{width}}" if column in right else f"{cell:<{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells)
