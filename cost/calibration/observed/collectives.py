"""Times of collectives in the traces of a run, without the time that ranks wait for each other.

A collective's kernel starts when its own rank has arrived, and ends when all have: on the last rank to arrive it takes
as long as the collective itself. Collectives of two ranks are matched by their index in the order of their process
group; of one that several traces show, the minimum is used. Where only one rank was traced, or a trace does not name
the group, the waiting time is unknown, and the minimum of equal collectives is the best estimate. So it is of a send,
which has a kernel on its sender only.

Ranks of an all-to-all may send and receive different numbers of bytes, as the experts of a mixture do. It takes as long
as an even one of the bytes that the busiest rank sends or receives, and counts as one of these.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from legoai.cost.calibration.observed.calls import DTYPES
from legoai.cost.calibration.observed.kernels import MICROSECONDS
from legoai.cost.calibration.observed.trace_files import Call, TraceFile
from legoai.cost.network.topology import Placement, placement
from legoai.cost.trace.records import CollectiveKind

_NCCL: Final[dict[str, CollectiveKind]] = {
    "allreduce": "all_reduce", "_allgather_base": "all_gather", "all_gather_into_tensor": "all_gather",
    "allgather": "all_gather", "all_gather": "all_gather", "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter", "reduce_scatter": "reduce_scatter", "broadcast": "broadcast",
    "all_to_all": "all_to_all", "all_to_allv": "all_to_all", "send": "send",
}  # fmt: skip
"""Kinds by NCCL's names. A `recv` waits for data not yet computed; coalesced operations are several in one."""
_ITEM: Final = {
    "Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Byte": 1, "Char": 1, "Short": 2, "Int": 4, "Long": 8, "Bool": 1,
    "Float8_e4m3fn": 1, "Float8_e5m2": 1, "Float8_e8m0fnu": 1,
}  # fmt: skip
_LARGER: Final = ("all_gather", "reduce_scatter", "all_to_all")
"""Kinds of which the larger one of input and output counts."""
_C10D: Final[dict[str, tuple[CollectiveKind, int]]] = {
    "c10d::_allgather_base_": ("all_gather", 0), "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::allreduce_": ("all_reduce", 0), "c10d::broadcast_": ("broadcast", 0),
    "c10d::alltoall_base_": ("all_to_all", 1),
}  # fmt: skip
"""The collective, and the index of the argument that is its whole buffer."""
_GLOO: Final = "gloo:"


@dataclass(frozen=True, slots=True)
class _Seen:
    """One collective on one rank.

    ``group`` identifies its process group equally on all ranks, of a send also the sender. Where several groups of the
    same size are possible, these are ``either``, and the name is empty.
    """

    kind: CollectiveKind
    bytes: int
    group: tuple[str, tuple[int, ...]]
    seconds: float
    either: tuple[tuple[int, ...], ...] = ()


@dataclass(slots=True, kw_only=True)
class CollectiveTimes:
    """Measured times of collectives.

    Attributes:
        seconds: of those that several ranks show, by kind, placement on hosts and bytes of the whole buffer.
        waited: of those that only one rank shows, or that cannot be matched; these include waiting for other ranks.
        unknown: number of those that were left out, by reason.
    """

    seconds: dict[tuple[CollectiveKind, Placement, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    waited: dict[tuple[CollectiveKind, Placement, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    unknown: Counter[str] = field(default_factory=Counter)

    def add(self, other: CollectiveTimes) -> None:
        """Add the times of another step or run."""
        for own, more in ((self.seconds, other.seconds), (self.waited, other.waited)):
            for key, times in more.items():
                own[key].extend(times)
        self.unknown.update(other.unknown)


@dataclass(slots=True)
class StepCollectives:
    """The collectives of one step, from the traces of its ranks."""

    found: CollectiveTimes = field(default_factory=CollectiveTimes)
    same: dict[tuple[Any, int], list[_Seen]] = field(default_factory=lambda: defaultdict(list))
    unmatched: list[_Seen] = field(default_factory=list)

    def note(self, trace: TraceFile) -> None:
        """Add those of one rank, by their index in the order of their group."""
        counts: Counter[Any] = Counter()
        for one in _of_device(trace, self.found) if trace.on_device else _of_gloo(trace, self.found):
            if one.either:
                self.unmatched.append(one)
                continue
            counts[one.group] += 1
            self.same[one.group, counts[one.group]].append(one)


def collective_times(step: StepCollectives, *, devices_per_host: int) -> CollectiveTimes:
    """Return the times of the collectives of one step; the minimum for those that several ranks show."""
    found = step.found
    for (group, _), seen in step.same.items():
        if len({(one.kind, one.bytes if one.kind != "all_to_all" else 0) for one in seen}) > 1:
            found.unknown["in another order on another rank"] += len(seen)
            continue
        on = placement(group[1], devices_per_host)
        times = found.seconds if len(seen) > 1 else found.waited
        if (least := min(one.seconds for one in seen)) > 0:
            times[seen[0].kind, on, max(one.bytes for one in seen)].append(least)
        else:
            found.unknown["without a duration"] += len(seen)
    for one in step.unmatched:
        if one.seconds <= 0:
            found.unknown["without a duration"] += 1
            continue
        places = {placement(ranks, devices_per_host) for ranks in one.either}
        if len(places) == 1:
            found.waited[one.kind, places.pop(), one.bytes].append(one.seconds)
        else:
            found.unknown["of a group that the trace does not name"] += 1
    return found


def _of_device(trace: TraceFile, found: CollectiveTimes) -> Iterator[_Seen]:
    """Yield the collectives of NCCL in one trace, in the order in which they ran."""
    for kernel in sorted((item for item in trace.kernels if item.collective is not None), key=lambda item: item.start):
        said = kernel.collective
        assert said is not None
        name = str(said.get("Collective name", ""))
        kind, item = _NCCL.get(name), _ITEM.get(str(said.get("dtype", "")))
        counts = said.get("In msg nelems"), said.get("Out msg nelems")
        if kind is None or item is None or not all(isinstance(count, int) for count in counts):
            found.unknown[name or "a kernel of NCCL without its arguments"] += 1
            continue
        ranks = _ranks(said, trace)
        if ranks is None:
            found.unknown["ranks of the group not in the trace"] += 1
            continue
        if len(ranks) < 2:
            continue
        if kind == "send":
            ranks = ranks[:2] if len(ranks) == 2 else ()
            if not ranks:
                found.unknown["send in a group of more than two"] += 1
                continue
        # The whole buffer is the output of an all-gather, and the input of all others.
        whole = max(counts[0] or 0, counts[1] or 0) if kind in _LARGER else counts[0]
        name = str(said.get("Process Group Name", ""))
        group = f"{name} from {trace.rank}" if kind == "send" else name, ranks
        if whole:
            yield _Seen(kind, whole * item, group, (kernel.end - kernel.start) * MICROSECONDS)


def _ranks(said: Any, trace: TraceFile) -> tuple[int, ...] | None:
    """Return the ranks of a kernel's group: as listed, or looked up by the group's name where the list is truncated."""
    try:
        ranks = json.loads(str(said.get("Process Group Ranks", "")))
    except ValueError:
        ranks = None
    size = said.get("Group size")
    if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks) and size in (None, len(ranks)):
        return tuple(ranks)
    known = dict(trace.groups).get(str(said.get("Process Group Name", "")))
    if known and size in (None, len(known)):
        return known
    start, stride = said.get("Global rank start"), said.get("Global rank stride")
    if isinstance(size, int) and isinstance(start, int) and isinstance(stride, int) and stride > 0:
        return tuple(range(start, start + size * stride, stride))
    return None


def _of_gloo(trace: TraceFile, found: CollectiveTimes) -> Iterator[_Seen]:
    """Yield the collectives of gloo in one trace: gloo's threads execute them in the order of the calls."""
    in_order = sorted(trace.calls, key=lambda call: call.start)
    called = [call for call in in_order if call.name in _C10D and call.arguments]
    waiting = [call for call in in_order if call.name.startswith(_GLOO)]
    for call in called:
        kind, argument = _C10D[call.name]
        assert call.arguments is not None
        elements, parts = _elements(call, argument), _elements(call, 1 - argument) if "_base_" in call.name else 0
        match = next((one for one in waiting if _elements(one, 0) in (elements, parts) and one.end > call.start), None)
        groups = _groups_of(trace, elements // parts if parts and kind != "all_to_all" else None)
        if match is None or not elements or len({len(ranks) for ranks in groups}) != 1:
            found.unknown["of a group that the trace does not name"] += 1
            continue
        waiting.remove(match)
        item = _item_bytes(call, argument) or _item_bytes(match, 0)
        first, *others = groups
        if len(first) > 1 and item:
            group = ("" if others else groups[first], first)
            either = tuple(groups) if others else ()
            elements = max(elements, parts) if kind == "all_to_all" else elements
            yield _Seen(kind, elements * item, group, (match.end - match.start) * MICROSECONDS, either)


def _elements(call: Call, index: int) -> int:
    shape = call.arguments[0][index] if call.arguments is not None and index < len(call.arguments[0]) else []
    while shape and isinstance(shape[0], list):
        shape = shape[0]
    return math.prod(shape) if shape and all(isinstance(size, int) for size in shape) else 0


def _item_bytes(call: Call, index: int) -> int:
    assert call.arguments is not None
    types = call.arguments[1] or []
    dtype = DTYPES.get(types[index]) if index < len(types) else None
    return 0 if dtype is None else dtype.itemsize


def _groups_of(trace: TraceFile, size: int | None) -> dict[tuple[int, ...], str]:
    """Return ranks and names of the groups of a size to which this rank belongs."""
    return {
        ranks: name for name, ranks in reversed(trace.groups) if trace.rank in ranks and size in (None, len(ranks))
    }  # fmt: skip
