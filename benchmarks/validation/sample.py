"""Stratified sample of rows from a file that is too long to be simulated as a whole.

Strata are the features of a row's configuration: framework, kinds of parallelism, checkpointing, precision. Rows are
drawn from each stratum in turn, in the order of a hash of their names. A longer sample includes each shorter one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from benchmarks.validation.rows import Row

_SEED = "legoai 1"
_DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")
_WORDS = ("model", "status", "ac_mode", "precision", "compile", "zero_stage", "pp_schedule", "gpu")


def drawn(rows: Sequence[Row], count: int | None) -> list[Row]:
    """At most ``count`` rows, in the order of the file; all for None."""
    if count is None or count >= len(rows):
        return list(rows)
    strata: dict[tuple[str, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: _shuffled(row.id)):
        strata.setdefault(stratum(row), []).append(row)
    names = sorted(strata, key=lambda name: _shuffled(repr(name)))
    turns = max(map(len, strata.values()))
    order = [strata[name][turn] for turn in range(turns) for name in names if turn < len(strata[name])]
    taken = {row.id for row in order[:count]}
    return [row for row in rows if row.id in taken]


def stratum(row: Row) -> tuple[str, ...]:
    """The features of a row's configuration: its words, and whether it has each kind of parallelism."""
    parallel = tuple(name for name in _DEGREES if (row.number(name) or 1) > 1)
    return (*parallel, *(f"{name}={row.text(name)}" for name in _WORDS))


def _shuffled(text: str) -> bytes:
    return hashlib.sha256(f"{_SEED} {text}".encode()).digest()
