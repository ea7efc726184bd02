"""Errors of predictions against measurements."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.validation.predict import Prediction
from benchmarks.validation.rows import GIB, Row
from benchmarks.validation.sources import fsdp_paper
from benchmarks.validation.statements import Stated

MIB = 2**20
_BEYOND_DEVICE = "LP704"
"""Diagnostic of lint: parameters, gradients and optimizer state alone exceed the memory of the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Measurements of a row and predictions for it; None where there is no measurement or no prediction.

    Attributes:
        id: the row's id.
        group: group of the statistics, such as a tier of its source.
        seconds: seconds of a step, measured and predicted.
        memory: bytes, measured and predicted, of the kind in `kind`.
        kind: `active` or `reserved`.
        fits: whether the run fitted, and whether it is predicted to fit.
        peer_seconds: seconds of a step, measured, and estimated by the source's own tool.
        peer_memory: bytes, measured, and estimated by the source's own tool.
        ranks: memory of every rank, where the source publishes it; see `RankMemory`.
    """

    id: str
    group: str
    seconds: tuple[float, float] | None = None
    memory: tuple[float, float] | None = None
    kind: str = ""
    fits: tuple[bool, bool] | None = None
    peer_seconds: tuple[float, float] | None = None
    peer_memory: tuple[float, float] | None = None
    ranks: tuple[RankMemory, ...] = ()


class RankMemory(NamedTuple):
    """Bytes of one rank: `active` and `reserved`, each measured and predicted."""

    rank: int
    active: tuple[float, float]
    reserved: tuple[float, float]


_PEER_MAX = re.compile(r"prediction: ([0-9.]+) ms \([^)]*\), alloc ([0-9.]+) GiB")
_CASE = re.compile(r"case=([^\s;,]+)")


def peer(row: Row) -> tuple[float | None, float | None]:
    """Seconds of a step and bytes that the source's own estimator predicts for the row, where published."""
    found = _PEER_MAX.search(row.text("notes"))
    if found is not None:
        return float(found[1]) / 1e3, float(found[2]) * GIB
    milliseconds = next((value for name in ("predicted_ms", "est_ms") if (value := row.number(name))), None)
    gib = next((value for name in ("estimated_gib", "est_gib") if (value := row.number(name))), None)
    return milliseconds / 1e3 if milliseconds else None, gib * GIB if gib else None


def rank_memories(row: Row, rows: Sequence[Row], predicted: Prediction) -> tuple[RankMemory, ...]:
    """Every rank's measured memory, with the prediction for its pipeline rank.

    Args:
        row: a run, whose notes name its case.
        rows: rows of all ranks of all cases; repeated measurements of other cases are left out.
        predicted: the prediction for the run.
    """
    case = _CASE.search(row.text("notes"))
    if case is None or predicted.refused or not predicted.active:
        return ()
    own = [item for item in rows if item.text("case") == case[1] == item.text("memory_source_case")]
    share = row.whole("n_gpus") // len(predicted.active)
    found = []
    for item in own:
        rank, active, reserved = item.whole("rank"), item.number("max_allocated_mb"), item.number("max_reserved_mb")
        if active is not None and reserved is not None:
            of_rank = predicted.active[rank // share], predicted.reserved[rank // share]
            found.append(RankMemory(rank, (active * MIB, of_rank[0]), (reserved * MIB, of_rank[1])))
    return tuple(found)


def compare(row: Row, stated: Stated, predicted: Prediction, ranks: Sequence[Row] = ()) -> Comparison:
    """Compare a row's measurements with a prediction.

    Args:
        row: a row of published measurements.
        stated: the row as a plan.
        predicted: the prediction for the plan.
        ranks: rows of the source's file of every rank's memory.
    """
    measured_seconds, measured_bytes, kind = measured(row)
    if row.text("status").lower().startswith("failed"):
        measured_seconds = measured_bytes = None  # it may have failed before its peak
    ran = {"ok": True, "oom": False, "failed": False}.get(row.text("status").lower())
    beside, beside_reserved = sum(stated.beside.values()), sum(stated.beside_reserved.values())
    seconds = memory = fits = None
    if not predicted.refused:
        if measured_seconds and predicted.seconds and not stated.untimed:
            seconds = measured_seconds, predicted.seconds
        by_rank = predicted.reserved if kind == "reserved" else predicted.active
        if measured_bytes and by_rank:
            of_rank = max(by_rank) if stated.rank is None else by_rank[min(stated.rank, len(by_rank) - 1)]
            memory = measured_bytes, of_rank + beside + (beside_reserved if kind == "reserved" else 0.0)
        if ran is not None and predicted.capacity is not None:
            fits = ran, max(predicted.reserved) + beside + beside_reserved + predicted.outside <= predicted.capacity
    elif ran is not None and _BEYOND_DEVICE in predicted.refused:
        fits = ran, False
    peer_seconds, peer_bytes = peer(row)
    return Comparison(
        id=row.id, group=group_of(row), seconds=seconds, memory=memory, kind=kind, fits=fits,
        peer_seconds=(seconds[0], peer_seconds) if seconds and peer_seconds else None,
        peer_memory=(memory[0], peer_bytes) if memory and peer_bytes else None,
        ranks=rank_memories(row, ranks, predicted),
    )  # fmt: skip


def measured(row: Row) -> tuple[float | None, float | None, str]:
    """Seconds of a step, bytes, and whether these are `active` or `reserved`, in the columns of all sources."""
    seconds = row.number("iter_time_s")
    if seconds is None and (milliseconds := row.number("actual_ms")) is not None:
        seconds = milliseconds / 1e3
    if seconds is None and (rate := row.number("tok_s_per_gpu")) is not None:
        gpus, tokens = row.number("gpus"), tokens_of(row)
        seconds = tokens / (rate * gpus) if gpus and tokens else None
    if row.text("metric") == "throughput_total" and (rate := row.number("value")):
        seconds = 8192 * (row.number("batch_size") or 1) * (row.number("gpus") or 1) / rate
    if row.text("metric") == fsdp_paper.METRIC and (rate := row.number("value")):
        seconds = fsdp_paper.step_operations(row.whole("batch_size"), row.whole("seq_len")) / (rate * 1e12)
    gib = next((value for name in ("mem_peak", "actual_gib", "memory_gib") if (value := row.number(name))), None)
    if row.text("metric") == "peak_memory":
        gib = row.number("value")
    reserved = "reserved" in row.text("mem_kind") or row.text("memory_gib") or row.text("metric")
    return seconds, gib * GIB if gib else None, "reserved" if reserved else "active"


def tokens_of(row: Row) -> float | None:
    """Tokens of a step of a row of the TorchTitan paper, which states sequences and their length by GPU."""
    batch = row.number("global_batch")
    if batch is None:
        local, shards = row.number("local_batch"), row.number("fsdp")
        batch = local * shards if local and shards else None
    return batch * (row.number("seq_len") or 8192) if batch else None


def group_of(row: Row) -> str:
    """The group of a row in the statistics: the tier in its notes, or its table."""
    for part in row.text("notes").replace(";", " ").split():
        if part.startswith("time_tier="):
            return f"tier {part.removeprefix('time_tier=')}"
    if row.text("notes") in ("single-node", "multi-node"):
        return row.text("notes")
    return row.text("table") and f"table {row.text('table')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Statistics of |predicted - measured| / measured over some rows; `bias` is the mean with its sign."""

    rows: int
    mean: float
    median: float
    worst: float
    bias: float
    worst_id: str


def errors(pairs: Sequence[tuple[str, tuple[float, float]]]) -> Errors | None:
    """Statistics of pairs of measured and predicted values, by row; None for no pairs."""
    if not pairs:
        return None
    relative = {name: (predicted - real) / real for name, (real, predicted) in pairs}
    worst = max(relative, key=lambda name: abs(relative[name]))
    sizes = [abs(value) for value in relative.values()]
    return Errors(
        rows=len(sizes),
        mean=statistics.fmean(sizes),
        median=statistics.median(sizes),
        worst=abs(relative[worst]),
        bias=statistics.fmean(relative.values()),
        worst_id=worst,
    )


def out_of_memory(found: Iterable[Comparison]) -> dict[str, Any]:
    """Precision and recall of the prediction that a row runs out of memory, on rows that ran and rows that failed."""
    cells = {(ran, fits): 0 for ran in (True, False) for fits in (True, False)}
    for item in found:
        if item.fits is not None:
            cells[item.fits] += 1
    warned, failed = cells[False, False] + cells[True, False], cells[False, False] + cells[False, True]
    return {
        "failed and said not to fit": cells[False, False],
        "failed and said to fit": cells[False, True],
        "ran and said not to fit": cells[True, False],
        "ran and said to fit": cells[True, True],
        "precision": cells[False, False] / warned if warned else None,
        "recall": cells[False, False] / failed if failed else None,
        "rows that ran and were said to fit": cells[True, True] / max(1, cells[True, True] + cells[True, False]),
    }
