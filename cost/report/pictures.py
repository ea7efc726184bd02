"""SVG pictures of a plan's mesh, pipeline schedule and timeline."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

from legoai.cost import words
from legoai.cost.estimate import Estimate, RankEstimate
from legoai.cost.graph_passes import PassEstimate
from legoai.cost.report.bars import Bar, rank_tracks
from legoai.cost.report.causes import Causes
from legoai.cost.report.chrome import Lines
from legoai.cost.timing.rank_timeline import ActionTime
from legoai.specs.directives.mesh import Mesh
from legoai.specs.units import counted

_ROW: Final = 26
_LEFT: Final = 96
_WIDE: Final = 1100
_MOST_BARS: Final = 4_000
_MOST_HOSTS: Final = 64
_MOST_IN_ROW: Final = (_WIDE - 20) // 30
"""Most ranks of a host beside each other."""
_FAINTEST: Final = 0.15
"""Least opacity of a bar; bars are the paler, the more of their time is idle."""
_LETTER: Final = 7.2
"""Pixels of a letter, on average."""
_STAGES: Final = (
    "forward", "backward", "copy", "recompute", "m7", "communication", "m2", "optimizer", "m9", "m5", "m11",
)  # fmt: skip
"""Colours of the coordinates on `pp`, all of them unlike each other; further coordinates begin with the first again."""
_PARTS: Final = tuple(
    (look, look) for look in ("forward", "recompute", "backward", "optimizer", "communication", "copy")
)
_MICRO_BATCH: Final = re.compile(r"(\d+)([A-Z_]+)(\d*)")
_LOOKS: Final = {"F": "forward", "B": "backward", "I": "backward", "W": "optimizer"}
_WORDS: Final = {"F": "forward", "B": "backward", "I": "gradients of inputs alone", "W": "gradients of weights alone"}


@dataclass(frozen=True, slots=True)
class _Axis:
    """A time axis to the right of the labels of rows.

    Attributes:
        seconds: that it shows.
        left: where it begins.
    """

    seconds: float
    left: float

    @classmethod
    def beside(cls, labels: Iterable[str], seconds: float) -> _Axis:
        """Return an axis that leaves room for labels."""
        return cls(seconds, max(_LEFT, 18 + max(map(_width, labels))))

    @property
    def scale(self) -> float:
        """Pixels of a second."""
        return (_WIDE - self.left - 8) / self.seconds

    def x(self, seconds: float) -> float:
        """Return the place of a point in time."""
        return self.left + seconds * self.scale

    def marks(self, bottom: float) -> Iterator[str]:
        """Yield time marks along the top."""
        raw = self.seconds / 8
        base = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * base for factor in (1, 2, 5, 10) if factor * base >= raw)
        place = 0
        while place * step <= self.seconds:
            x = self.x(place * step)
            yield f'<line class="rule" x1="{x:.1f}" y1="20" x2="{x:.1f}" y2="{bottom:.0f}"/>'
            yield _text(min(x + 3, _WIDE - 52), 14, words.seconds(place * step), "soft")
            place += 1


def pipeline_picture(estimate: Estimate, *, alone: bool = False) -> str:
    """Return the time of each action of the schedule on each rank, labelled with its micro batch.

    Args:
        estimate: of a plan with a pipeline.
        alone: whether the SVG is a file of its own, with its own colours.
    """
    ranks = estimate.ranks
    height = 34 + len(ranks) * _ROW + 34
    axis = _Axis.beside((f"rank {item.rank}" for item in ranks), estimate.step_time)
    parts = [*axis.marks(height - 34)]
    for row, item in enumerate(ranks):
        top = 26 + row * _ROW
        parts.append(_text(6, top + 17, f"rank {item.rank}", "soft"))
        parts.append(_rect(axis.left, top + 2, estimate.step_time * axis.scale, _ROW - 4, "idle"))
        parts += [piece for action in item.actions for piece in _action(action, top, axis)]
    kinds = {match[2] for item in ranks for action in item.actions if (match := _MICRO_BATCH.match(action.name))}
    parts += _legend([(look, _WORDS[kind]) for kind, look in _LOOKS.items() if kind in kinds], axis.left, height - 12)
    return _svg(parts, _WIDE, height, f"Pipeline schedule of {estimate.plan}", alone=alone)


def _action(action: ActionTime, top: float, axis: _Axis) -> Iterator[str]:
    match = _MICRO_BATCH.match(action.name)
    kind = match[2] if match is not None else ""
    look = _LOOKS.get(kind)
    if look is None:
        return  # UNSHARD, RESHARD, and overlapped pairs whose parts are drawn themselves
    wide = (action.end - action.start) * axis.scale
    name = f"{action.name}: {words.seconds(action.end - action.start)} from {words.seconds(action.start)}"
    yield _rect(axis.x(action.start), top + 2, max(0.5, wide - 0.6), _ROW - 4, look, name)
    label = match[3] if match is not None else ""
    if label and wide > 8 * len(label) + 4:
        yield _text(axis.x(action.start) + wide / 2, top + 17, label, "number")


def timeline_picture(item: RankEstimate, causes: Causes, *, name: str) -> str:
    """Return the operations of a rank's step on each of its streams and communicators, as an SVG file."""
    shown = rank_tracks(item, Lines(causes), most=_MOST_BARS)
    total = item.breakdown.seconds
    height = 34 + len(shown) * _ROW + 34
    axis = _Axis.beside((track.name for track in shown), total)
    parts = [*axis.marks(height - 34)]
    for row, track in enumerate(shown):
        top = 26 + row * _ROW
        parts.append(_text(6, top + 17, track.name, "soft"))
        parts += [_bar(bar, top, axis) for bar in track.bars]
    parts += _legend(_PARTS, axis.left, height - 12)
    return _svg(parts, _WIDE, height, f"A step of {name} on rank {item.rank}", alone=True)


def passes_picture(found: Sequence[PassEstimate], causes: Causes, *, name: str) -> str:
    """Return a step with its graph as traced above the one after all passes, on one time scale, as an SVG file.

    There is a lane for computation, for each stream and mesh axis that communicates, and for copies from and to the
    host.

    Args:
        found: the estimates as traced, first, and after all passes, last.
        causes: the plan's lines.
        name: of the plan.
    """
    total = max(item.estimate.step_time for item in found)
    bands = [(item, _lanes(item.estimate.slowest, causes)) for item in (found[0], found[-1])]
    height = 34 + sum(_ROW * (len(lanes) + 1) + 12 for _, lanes in bands) + 34
    axis = _Axis.beside((lane for _, lanes in bands for lane in lanes), total)
    parts = [*axis.marks(height - 34)]
    top = 26.0
    for item, lanes in bands:
        title = f"after {item.count} passes" if item.count else item.name
        exposed = f"{words.seconds(item.estimate.exposed_communication)} of it exposed communication"
        parts.append(_text(6, top + 17, f"{title}: {words.seconds(item.estimate.step_time)}, {exposed}", "ink"))
        for lane, bars in lanes.items():
            top += _ROW
            parts.append(_text(6, top + 17, lane, "soft"))
            parts.append(_rect(axis.left, top + 2, item.estimate.step_time * axis.scale, _ROW - 4, "idle"))
            parts += [_bar(bar, top, axis) for bar in bars]
        top += _ROW + 12
    parts += _legend(_PARTS, axis.left, height - 12)
    return _svg(parts, _WIDE, height, f"A step of {name} before and after the passes over its graph", alone=True)


def _lanes(item: RankEstimate, causes: Causes) -> dict[str, list[Bar]]:
    """Return the bars of a rank by lane: tracks with more than copies, followed by all copies."""
    found: dict[str, list[Bar]] = {}
    copies = []
    for track in rank_tracks(item, Lines(causes), most=_MOST_BARS):
        other = [bar for bar in track.bars if bar.look != "copy"]
        copies += [bar for bar in track.bars if bar.look == "copy"]
        if other:
            found[track.name] = other
    return found | ({"copies": copies} if copies else {})


def _bar(bar: Bar, top: float, axis: _Axis) -> str:
    busy, whole = words.seconds(bar.busy), words.seconds(bar.end - bar.start)
    what = f"{bar.module}: {bar.name}, {bar.look}, {busy}{'' if busy == whole else f' of {whole}'}"
    wide = max(0.4, (bar.end - bar.start) * axis.scale)
    opacity = max(_FAINTEST, round(bar.share, 2))
    return _rect(axis.x(bar.start), top + 2, wide, _ROW - 4, bar.look, f"{what} {bar.line}".strip(), opacity)


def mesh_picture(mesh: Mesh, *, devices_per_host: int, name: str) -> str:
    """Return the placement of ranks on hosts, and the ranks that each axis joins, as an SVG file.

    Ranks fill one host's devices before the next host's, and axes are nested with `pp` outermost, as in
    `init_device_mesh`.

    Args:
        mesh: the plan's.
        devices_per_host: of its cluster.
        name: of the plan.
    """
    axes = mesh.used()
    world = mesh.world_size
    hosts = -(-world // devices_per_host)
    shown = min(hosts, _MOST_HOSTS)
    lines = -(-devices_per_host // _MOST_IN_ROW)
    in_row = -(-devices_per_host // lines)
    across = max(1, min(8, shown, (_WIDE - 12) // (in_row * 30 + 22)))
    wide, high = in_row * 30 + 12, 24 + 30 * -(-min(world, devices_per_host) // in_row)
    counts = f": {counted(world, 'rank')} on {counted(hosts, 'host')}"
    parts = [_text(6, 20, _shortened(name, _WIDE - 12 - _width(counts)) + counts, "ink")]
    top = 36.0
    for axis in axes:
        parts.append(_text(6, top + 12, _axis_words(mesh, axis, devices_per_host), "soft"))
        top += 20
    stages, per_stage = mesh.size("pp"), world // mesh.size("pp")
    top += 8
    for host in range(shown):
        left, y = 6 + host % across * (wide + 10), top + host // across * (high + 8)
        parts.append(f'<rect class="box" x="{left}" y="{y:.0f}" width="{wide}" height="{high}" rx="6"/>')
        ranks = range(host * devices_per_host, min(world, (host + 1) * devices_per_host))
        first, last = ranks[0] // per_stage, ranks[-1] // per_stage
        named = f"host {host}, pp {first}" + (f"–{last}" if last > first else "")
        fits = stages > 1 and _width(named) <= wide - 12
        parts.append(_text(left + 6, y + 15, named if fits else f"host {host}", "soft"))
        for rank in ranks:
            stage = rank // per_stage
            line, column = divmod(rank % devices_per_host, in_row)
            x, above = left + 6 + column * 30, y + line * 30
            parts.append(_rect(x, above + 22, 27, 26, _STAGES[stage % len(_STAGES)], _coordinates(mesh, rank)))
            if rank < 10_000:
                parts.append(_text(x + 13.5, above + 39, str(rank), "number"))
    height = top + -(-shown // across) * (high + 8) + 10
    if hosts > shown:
        parts.append(_text(6, height + 8, f"and {hosts - shown:,} more hosts", "soft"))
        height += 22
    if stages > 1:
        title = "A colour for each coordinate on pp:"
        parts.append(_text(6, height + 8, title, "soft"))
        marks = [(look, _of_colour(place, stages)) for place, look in enumerate(_STAGES[:stages])]
        rows = _rows(marks, 18 + _width(title))
        for row in rows:
            parts += _legend(row, 18 + _width(title), height + 8)
            height += 20
        height += 4
    return _svg(parts, _WIDE, height, f"Mesh of {name}", alone=True)


def _of_colour(place: int, stages: int) -> str:
    """`pp 0, 11, …`: the coordinates that have one colour."""
    places = list(map(str, range(place, stages, len(_STAGES))))
    return f"pp {', '.join(places if len(places) <= 3 else [*places[:2], '…'])}"


def _axis_words(mesh: Mesh, axis: str, devices_per_host: int) -> str:
    """`tp = 8: ranks 0, 1, 2, …, 7 on one host`."""
    ranks = axis_group(mesh, axis)
    hosts = len({rank // devices_per_host for rank in ranks})
    where = "on one host" if hosts == 1 else f"on {hosts} hosts"
    listed = ", ".join(map(str, ranks if len(ranks) <= 8 else [*ranks[:3], "…", ranks[-1]]))
    return f"{axis} = {len(ranks)}: rank 0 is joined with {listed}, {where}"


def axis_group(mesh: Mesh, axis: str) -> list[int]:
    """Return the ranks that differ from rank 0 only on one axis, including rank 0."""
    return [place * mesh.stride(axis) for place in range(mesh.size(axis))]


def _coordinates(mesh: Mesh, rank: int) -> str:
    places, rest = [], rank
    for axis in reversed(mesh.used()):
        rest, place = divmod(rest, mesh.size(axis))
        places.append(f"{axis} {place}")
    return f"rank {rank}: {', '.join(reversed(places)) or 'alone'}"


def _legend(marks: Sequence[tuple[str, str]], left: float, y: float) -> Iterator[str]:
    x = left
    for look, name in marks:
        yield _rect(x, y - 10, 12, 12, look)
        yield _text(x + 17, y, name, "soft")
        x += _mark_width(name)


def _rows(marks: Sequence[tuple[str, str]], left: float) -> list[list[tuple[str, str]]]:
    """Return the marks of a legend in rows that are not wider than the picture."""
    rows: list[list[tuple[str, str]]] = [[]]
    for mark in marks:
        if left + sum(_mark_width(name) for _, name in [*rows[-1], mark]) > _WIDE:
            rows.append([])
        rows[-1].append(mark)
    return rows


def _mark_width(name: str) -> float:
    return 34 + _width(name)


def _width(text: str) -> float:
    return _LETTER * len(text)


def _shortened(text: str, wide: float) -> str:
    """A text whose end is left out where it is wider than so many pixels; bold letters are wider than others."""
    most = int(wide / (1.2 * _LETTER))
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _rect(  # noqa: PLR0917 - a place, a size and a look
    x: float, y: float, wide: float, high: float, look: str, title: str = "", opacity: float = 1.0
) -> str:
    style = f"fill:var(--{look})" + (f";opacity:{opacity:.2f}" if opacity < 1 else "")
    inside = f"><title>{escape(title)}</title></rect>" if title else "/>"
    return f'<rect x="{x:.2f}" y="{y:.0f}" width="{wide:.2f}" height="{high:.0f}" style="{style}"{inside}'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.0f}">{escape(text)}</text>'


_STYLE: Final = (
    "svg text{font:12px system-ui,sans-serif}svg .soft{fill:var(--soft)}svg .ink{fill:var(--ink);font-weight:600}"
    "svg .number{fill:#000;text-anchor:middle;font-size:11px}svg .rule{stroke:var(--rule)}"
    "svg .box{fill:var(--panel);stroke:var(--rule)}"
)


def _svg(parts: Sequence[str], wide: float, high: float, title: str, *, alone: bool) -> str:
    style, ground = _STYLE, ""
    if alone:
        css = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
        style = css.partition("* {")[0] + _STYLE
        ground = '<rect width="100%" height="100%" style="fill:var(--paper)"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high:.0f}" width="{wide:.0f}" '
        f'height="{high:.0f}" role="img"><title>{escape(title)}</title><style>{style}</style>{ground}'
        + "".join(parts)
        + "</svg>\n"
    )
