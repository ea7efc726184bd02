"""Self-contained HTML report of an estimate: timeline, memory, tables, and the plan that they link to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from legoai.cost import words
from legoai.cost.estimate import Estimate
from legoai.cost.report.bars import MOST, Track, rank_tracks
from legoai.cost.report.causes import Cause, Causes
from legoai.cost.report.checkpointing import recomputed_calls, saved_outputs
from legoai.cost.report.chrome import Lines
from legoai.cost.report.curve import Point, memory_curve
from legoai.cost.report.holders import causes_of_categories, holders, offloaded
from legoai.cost.report.parts import COMMUNICATION, COPIES, HOST, LAUNCH
from legoai.cost.report.pictures import pipeline_picture
from legoai.cost.trace.records import Category
from legoai.specs.units import counted

_SHOWN = 15
_FEWEST = 8_000
"""Most bars of one rank if there are many ranks."""
_HERE = Path(__file__).parent
_LOOKS = ("forward", "backward", "recompute", "optimizer", "communication", "copy", "other", "setup")


def page(estimate: Estimate, causes: Causes) -> str:
    """Return the page's HTML. It loads nothing, and follows the reader's light or dark scheme."""
    most = max(_FEWEST, MOST // len(estimate.ranks))
    shown = {item.rank: rank_tracks(item, Lines(causes), most=most) for item in estimate.ranks}
    curves = {item.rank: memory_curve(item) for item in estimate.ranks}
    parts = [
        *_head(estimate),
        *_where(estimate),
        *_timeline(estimate, curves),
        *_pipeline(estimate),
        *_memory(estimate, causes),
        *_holders(estimate, causes),
        *_saved(estimate, causes),
        *_modules(estimate, causes),
        *_recomputed(estimate, causes),
        *_collectives(estimate, causes),
        *_requirements(estimate),
        *_basis(estimate),
        *_plan(causes),
    ]
    title = escape(f"{estimate.plan}: {words.seconds(estimate.step_time)}, {words.share(estimate.mfu)} MFU")
    data = json.dumps(_data(estimate, shown, curves), separators=(",", ":")).replace("<", "\\u003c")
    return "\n".join([
        "<!doctype html>",
        '<html lang="en">',
        '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>",
        f"<style>\n{_asset('page.css')}</style></head>",
        "<body><main>",
        *parts,
        "</main>",
        f'<script type="application/json" id="data">{data}</script>',
        f"<script>\n{_asset('page.js')}</script>",
        "</body></html>\n",
    ])  # fmt: skip


def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _head(estimate: Estimate) -> Iterator[str]:
    cluster, device = estimate.machine.cluster, estimate.machine.device
    variant = f", variant {estimate.variant}" if estimate.variant else ""
    hosts = counted(cluster.hosts, "host")
    fabric = f" on {cluster.fabric.name}" if cluster.fabric is not None else ""
    yield f"<h1>{escape(estimate.plan + variant)}</h1>"
    yield f'<p class="soft">{estimate.world_size} × {escape(device.name)}, {hosts}{escape(fabric)}</p>'
    use = estimate.fullest.use
    capacity = f"of {words.size(use.capacity)}" if use.capacity is not None else "peak active memory"
    verdict = {True: "", False: ", does not fit", None: ""}[estimate.fits]
    figures = [
        (words.seconds(estimate.step_time), "an optimizer step"),
        (f"{estimate.tokens_per_second_per_device:,.0f}", f"{estimate.unit} per second and device"),
        (words.share(estimate.mfu), f"of {estimate.peak_flops / 1e12:,.4g} TFLOP/s (MFU)"),
        (words.size(estimate.peak_active), f"active, {words.size(use.total)} in total {capacity}{verdict}"),
    ]
    if estimate.unit == "tokens":
        figures.append((f"{estimate.device_hours_per_trillion_tokens:,.0f}", "device-hours for 10¹² tokens"))
    yield '<div class="figures">'
    for value, name in figures:
        yield f'<div class="figure"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
    yield "</div>"


def _where(estimate: Estimate) -> Iterator[str]:
    one, total = estimate.slowest.breakdown, estimate.step_time
    rows = [(look, f"{look} computation" if look != "recompute" else "recomputation", one.by_phase.get(look, 0.0))
            for look in ("forward", "recompute", "backward", "optimizer", "other")]  # fmt: skip
    rows.append(("communication", COMMUNICATION, one.exposed))
    rows.append(("copy", COPIES, one.copies))
    rows.append(("setup", HOST, one.host))
    rows.append(
        (
            "idle",
            "pipeline bubble and waiting" if len(estimate.ranks) > 1 else LAUNCH,
            one.idle,
        )
    )
    rows = [row for row in rows if row[2] > 0.0005 * total]
    busiest = f", on rank {estimate.slowest.rank}, the busiest of {len(estimate.ranks)}"
    yield f"<h2>Step time breakdown{busiest if len(estimate.ranks) > 1 else ''}</h2>"
    bars = "".join(
        f'<i style="width:{100 * took / total:.3f}%;background:var(--{look})" title="{escape(name)}"></i>'
        for look, name, took in rows
    )
    yield f'<div class="stack">{bars}</div>'
    body = [
        (f'<span class="mark" style="background:var(--{look})"></span>{escape(name)}', took)
        for look, name, took in rows
    ]
    axes = [(f'<span class="inset">on {escape(axis)}</span>', took) for axis, took in one.exposed_by_axis.items()]
    place = next((index for index, row in enumerate(rows) if row[0] == "communication"), len(body) - 1)
    body[place + 1 : place + 1] = [row for row in axes if row[1] > 0.0005 * total]
    yield from _table(
        ("", "n:seconds", "n:of the step"),
        [(name, words.seconds(took), words.share(took / total)) for name, took in body],
    )
    kinds = ", ".join(
        f"{words.KINDS.get(kind, kind)} {words.share(took / total)}"
        for kind, took in one.by_kind.items()
        if took > 0.002 * total
    )
    yield f'<p class="soft">Computation by kind, of the step: {escape(kinds)}.</p>'


def _timeline(estimate: Estimate, curves: Mapping[int, Sequence[Point]]) -> Iterator[str]:
    yield "<h2>Timeline and memory</h2>"
    yield '<div class="tools">'
    if len(estimate.ranks) > 1:
        chosen = estimate.slowest.rank
        options = "".join(
            f'<option value="{index}"{" selected" if item.rank == chosen else ""}>'
            f"rank {item.rank}, stage {item.stage}</option>"
            for index, item in enumerate(estimate.ranks)
        )
        yield f'<select id="rank" aria-label="rank">{options}</select>'
    yield '<button id="in">zoom in</button><button id="out">zoom out</button><button id="all">whole step</button>'
    yield '<span class="soft">drag to move; double click, or ctrl or shift and the wheel, to zoom</span></div>'
    looks = [look for look in _LOOKS if look != "setup"]
    marks = "".join(f'<span><span class="mark" style="background:var(--{look})"></span>{look}</span>' for look in looks)
    yield f'<div class="legend">{marks}</div>'
    yield (
        '<div class="chart"><canvas id="timeline" tabindex="0" role="img" aria-label="The operations of a step on each '
        'stream, and the memory that is active"></canvas><div id="tip"></div></div>'
    )
    used = {category for curve in curves.values() for point in curve for category, size in point.bytes.items() if size}
    marks = "".join(
        f'<span><span class="mark" style="background:var(--m{place})"></span>{escape(name)}</span>'
        for place, (category, name) in enumerate(words.CATEGORIES.items())
        if category in used
    )
    yield f'<div class="legend">{marks}</div>'


def _pipeline(estimate: Estimate) -> Iterator[str]:
    if len(estimate.ranks) > 1:
        yield "<h2>Pipeline</h2>"
        yield f'<div class="scroll">{pipeline_picture(estimate)}</div>'
        yield f'<p class="soft">{words.share(estimate.bubble_fraction)} of the step is bubble.</p>'


def _memory(estimate: Estimate, causes: Causes) -> Iterator[str]:
    item = estimate.fullest
    yield f"<h2>Memory at the peak of rank {item.rank}, in {item.memory.peak_phase}</h2>"
    by_cause = causes_of_categories(item.memory, causes)
    rows = [
        (
            _category(category),
            words.size(size),
            words.share(size / item.memory.peak),
            _link(next(iter(by_cause[category]))),
        )
        for category, size in item.memory.by_category.items()
    ]
    if estimate.machine.device.kind != "cpu":
        cause = _link(causes.of_segments()) if estimate.machine.expandable_segments else ""
        rows.append(("reserved by PyTorch", words.size(item.use.reserved), "", cause))
        rows += [(words.OUTSIDE[name], words.size(size), "", "") for name, size in item.use.outside.items()]
    yield from _table(("", "n:bytes", "n:of the peak", "cause"), rows)
    if estimate.host_memory is not None:
        size, held = offloaded(estimate.host_memory)
        yield f'<p class="soft">Offloaded to host memory: {size} {held}.</p>'


def _holders(estimate: Estimate, causes: Causes) -> Iterator[str]:
    yield "<h2>Modules with the most memory at the peak</h2>"
    rows = []
    for item in holders(estimate.fullest.memory, causes)[:_SHOWN]:
        parts = [f"{_category(category)} {words.size(size)}" for category, size in item.by_category.items()]
        found = dict.fromkeys(map(_link, item.causes))
        rows.append(
            (
                _alike(item.pattern, item.modules),
                words.size(item.bytes),
                words.share(item.bytes / estimate.fullest.memory.peak),
                ", ".join(parts),
                "; ".join(found),
            )
        )
    yield from _table(("module", "n:bytes", "n:of the peak", "of it", "cause"), rows)


def _saved(estimate: Estimate, causes: Causes) -> Iterator[str]:
    found = saved_outputs(estimate.fullest, causes)
    if found:
        yield "<h2>Most memory of saved outputs at the peak</h2>"
        rows = [
            (
                _alike(item.pattern, item.modules),
                _operator(item.op),
                words.size(item.bytes),
                words.share(item.bytes / estimate.fullest.memory.peak),
                _link(item.cause),
            )
            for item in found[:_SHOWN]
        ]
        yield from _table(("module", "operator", "n:bytes", "n:of the peak", "cause"), rows)


def _modules(estimate: Estimate, causes: Causes) -> Iterator[str]:
    yield "<h2>Most expensive modules</h2>"
    total = estimate.step_time
    rows = [
        (
            _alike(item.pattern, item.modules),
            words.seconds(item.seconds),
            words.share(item.seconds / total),
            words.seconds(item.recompute) if item.recompute else "",
            _operator(item.op),
            "; ".join(dict.fromkeys(map(_link, causes.of_module(item)))),
        )
        for item in causes.modules(estimate.slowest)[:_SHOWN]
    ]
    yield from _table(("module", "n:seconds", "n:of the step", "n:recomputed", "longest operator", "cause"), rows)


def _recomputed(estimate: Estimate, causes: Causes) -> Iterator[str]:
    found = recomputed_calls(estimate.slowest, causes)
    if found:
        yield "<h2>Most expensive recomputation</h2>"
        rows = [
            (
                _alike(item.pattern, item.modules),
                _operator(item.op),
                words.seconds(item.seconds),
                words.calls(item.calls, item.of),
                _link(item.cause),
            )
            for item in found[:_SHOWN]
        ]
        yield from _table(("module", "operator", "n:seconds", "n:recomputed", "cause"), rows)


def _collectives(estimate: Estimate, causes: Causes) -> Iterator[str]:
    found = causes.collectives(estimate.slowest)[:_SHOWN]
    if not found:
        return
    yield "<h2>Most expensive collectives</h2>"
    rows = []
    for item in found:
        cause = causes.of_collective(item)
        rows.append(
            (
                f"{item.count} × {escape(item.kind)}",
                f"{escape(item.axis or 'other ranks')} ({item.ranks})",
                f"<code>{escape(words.path(item.pattern))}</code>, {item.phase}",
                words.size(item.bytes),
                words.seconds(item.seconds),
                words.seconds(item.exposed),
                _link(cause) if cause is not None else "runtime",
            )
        )
    yield from _table(("", "axis (ranks)", "module", "n:bytes", "n:seconds", "n:exposed", "cause"), rows)


def _requirements(estimate: Estimate) -> Iterator[str]:
    if not estimate.requirements:
        return
    yield "<h2>Requirements</h2>"
    rows = []
    for item in estimate.requirements:
        required = item.requirement
        verdict = '<span class="ok">ok</span>' if item.ok else '<span class="violated">violated</span>'
        limit = words.bound(required.bound, required.dimension)
        rows.append(
            (
                f"<code>{escape(f'{required.metric} {required.comparison} {limit}')}</code>",
                words.bound(item.value, required.dimension),
                verdict,
                _link(Cause("require", required.origin)),
            )
        )
    yield from _table(("", "n:estimate", "", "line"), rows)


def _basis(estimate: Estimate) -> Iterator[str]:
    profile = estimate.machine.profile
    models = ", ".join(f"{words.share(share)} {name}" for name, share in estimate.share_by_model.items())
    yield "<h2>Sources</h2>"
    yield f"<p>Time models: {escape(models)}.</p>"
    yield f"<p>Profile {escape(profile.name)}, made {escape(profile.made)}, {profile.hash}.</p>"
    yield f"<p>Model FLOPs: {escape(estimate.flops_convention)}. Peak: {escape(estimate.peak_source)}.</p>"
    for line in estimate.assumptions:
        yield f"<p>Assumed: {escape(line)}.</p>"
    yield f'<p class="soft">Plan {escape(estimate.digest)}.</p>'


def _plan(causes: Causes) -> Iterator[str]:
    resolution = causes.analysis.resolution
    assert resolution is not None, "a page is of a plan with a text"
    files = resolution.files
    yield "<h2>The plan</h2>"
    for name, file in files.items():
        yield f'<p class="soft">{escape(name)}</p>'
        lines = file.text.rstrip("\n").split("\n")
        body = "".join(
            f'<span id="{_anchor(name, number)}" data-n="{number}">{escape(line) or " "}</span>'
            for number, line in enumerate(lines, 1)
        )
        yield f'<pre class="plan">{body}</pre>'


def _category(category: Category) -> str:
    place = list(words.CATEGORIES).index(category)
    return f'<span class="mark" style="background:var(--m{place})"></span>{words.CATEGORIES[category]}'


def _alike(pattern: str, modules: int) -> str:
    """Return the path of equal modules, and their number."""
    return f"<code>{escape(words.path(pattern))}</code>" + (f" × {modules}" if modules > 1 else "")


def _operator(op: str) -> str:
    return f"<code>{escape(words.operator(op))}</code>"


def _link(cause: Cause) -> str:
    span = cause.origin.span
    if span is None:
        return f"{escape(cause.words)} (default)"
    return f'<a href="#{_anchor(span.file, span.line)}">{escape(cause.words)}, line {span.line}</a>'


def _anchor(file: str, line: int) -> str:
    return escape(f"{file}:{line}".replace(" ", "_"))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a table; headings that begin with `n:` mark columns of numbers. Cells are HTML, and the last may wrap."""
    kinds = [' class="n"' if name.startswith("n:") else "" for name in head]
    if not kinds[-1]:
        kinds[-1] = ' class="wide"'
    yield '<div class="scroll"><table>'
    if any(head):
        cells = "".join(
            f"<th{kind}>{escape(name.removeprefix('n:'))}</th>" for name, kind in zip(head, kinds, strict=True)
        )
        yield f"<thead><tr>{cells}</tr></thead>"
    yield "<tbody>"
    for row in rows:
        yield "<tr>" + "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
    yield "</tbody></table></div>"


def _data(
    estimate: Estimate, shown: Mapping[int, Sequence[Track]], curves: Mapping[int, Sequence[Point]]
) -> dict[str, Any]:
    """Return what the page's script draws.

    A bar is seven numbers: start, duration, name, module, look, line, and busy seconds, or 0 where they are all of it.
    """
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    ranks = []
    for item in estimate.ranks:
        tracks = []
        for track in shown[item.rank]:
            flat: list[float] = []
            for bar in track.bars:
                look = _LOOKS.index(bar.look) if bar.look in _LOOKS else _LOOKS.index("other")
                flat += [
                    round(bar.start, 8), round(bar.end - bar.start, 9), number(bar.name), number(bar.module), look,
                    number(bar.line), round(bar.busy, 9) if bar.share < 0.999 else 0,
                ]  # fmt: skip
            tracks.append({"name": track.name, "bars": flat})
        ranks.append({"rank": item.rank, "tracks": tracks, "memory": _curve(curves[item.rank])})
    return {"seconds": estimate.step_time, "ranks": ranks, "texts": list(texts), "looks": _LOOKS}


def _curve(points: Sequence[Point]) -> dict[str, Any]:
    used = [category for category in words.CATEGORIES if any(point.bytes.get(category) for point in points)]
    places = {category: place for place, category in enumerate(words.CATEGORIES)}
    return {
        "at": [round(point.at, 8) for point in points],
        "total": [point.total for point in points],
        "categories": [words.CATEGORIES[category] for category in used],
        "looks": [places[category] for category in used],
        "values": [[point.bytes.get(category, 0) for point in points] for category in used],
    }
