"""Measured steps of vTrain's runs on one host without a pipeline, split into blocks, ends and update.

Of runs with equal features, tensor parallel ranks and sequences of a micro batch, a step is taken to be
``m (L block + ends) + parameters (update + reduction (2 - 2 / replicas))`` for m micro batches and L blocks. All are
fitted at once, by least squares of relative errors.

    python -m benchmarks.regret.split_steps FOLDER
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from benchmarks.validation.rows import Row, UnstatedError, read
from benchmarks.validation.sources import SOURCES
from benchmarks.validation.sources.common import padded_vocabulary

_DEVICES = 8
"""Of a host."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.regret.split_steps")
    parser.add_argument("folder", type=Path, help="folder of published runs")
    try:
        every = read(parser.parse_args(arguments).folder / SOURCES["vtrain"].file)
    except UnstatedError as error:
        print(f"split_steps: {error}", file=sys.stderr)
        return 2
    print(report([row for row in every if row.dropped is None and _is_alone(row)]))
    return 0


def _is_alone(row: Row) -> bool:
    return row.whole("n_gpus") <= _DEVICES and row.whole("pp", 1) == 1


def _kind(row: Row) -> tuple[int, int, int]:
    """Features, tensor parallel ranks, and sequences of a micro batch."""
    return row.whole("hidden"), row.whole("tp", 1), row.whole("micro_batch")


def report(rows: Sequence[Row]) -> str:
    """Milliseconds of a block and of the ends of a micro batch, of each kind of runs."""
    kinds = sorted({_kind(row) for row in rows})
    terms = np.zeros((len(rows), 2 * len(kinds) + 2))
    for own, row in zip(terms, rows, strict=True):
        place, micro_batches, layers = kinds.index(_kind(row)), row.whole("grad_accum"), row.whole("n_layers")
        replicas = row.whole("dp_replicate", 1)
        own[place], own[len(kinds) + place] = micro_batches * layers, micro_batches
        own[-2] = _parameters(row)
        own[-1] = own[-2] * 2 * (replicas - 1) / replicas
    terms /= 1e3 * np.array([[row.number("iter_time_s") or 0.0] for row in rows])
    found, *_ = np.linalg.lstsq(terms, np.ones(len(rows)), rcond=None)
    error = float(np.sqrt(np.mean((terms @ found - 1.0) ** 2)))
    lines = ["| features | tp | sequences | runs | a block, ms | ends, ms |", "|---|---|---|---|---|---|"]
    for place, (hidden, tp, sequences) in enumerate(kinds):
        runs = sum(_kind(row) == kinds[place] for row in rows)
        block, ends = found[place], found[len(kinds) + place]
        lines.append(f"| {hidden} | {tp} | {sequences} | {runs} | {block:.2f} | {ends:.1f} |")
    lines += ["", f"{len(rows)} runs, error {error:.2%}; update {found[-2] * 1e3:.1f} ms for a billion parameters."]
    return "\n".join(lines)


def _parameters(row: Row) -> float:
    """Millions of parameters of a rank."""
    hidden, tp = row.whole("hidden"), row.whole("tp", 1)
    vocabulary = padded_vocabulary(row.whole("vocab"), tp)
    return (12 * hidden**2 * row.whole("n_layers") + vocabulary * hidden) / tp / 1e6


if __name__ == "__main__":
    sys.exit(main())
