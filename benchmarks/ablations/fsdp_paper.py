"""Scaling in the PyTorch FSDP paper (Zhao et al. 2023), as pairs of plans that differ in their devices.

What the paper compares otherwise is FSDP with and without something that a plan cannot leave out: FSDP2 always gathers
the next unit in backward, and its gathers need no rate limiter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks.ablations.claims import Claim, Pair, Unstated
from benchmarks.validation.rows import Row
from benchmarks.validation.sources.fsdp_paper import FLAT_PARAMETERS, GPT, METRIC, T5, Model, stated
from benchmarks.validation.statements import Draft

FILE: Final = "seeds/fsdp_paper.csv"
_MOST: Final = 512
_UNSTATED: Final = {
    "backward_prefetch_speedup": "FSDP2 always gathers the next unit of backward ahead",
    "rate_limiter_speedup": "FSDP2 gathers by its own streams and has no rate limiter",
    "rate_limiter_overhead": "FSDP2 gathers by its own streams and has no rate limiter",
    "fsdp_vs_ddp_performance": "no ratio",
    METRIC: "a rate: `validation_fsdp_paper.json` compares the time of its step",
}


def claims(rows: Sequence[Row]) -> Iterator[Claim | Unstated]:
    """Yield the paper's ratios; rows that only describe its experiments have none."""
    for row in rows:
        metric = row.text("metric")
        if metric == "scalability":
            yield _scaling(row, GPT, 1.0, fewest=128, batches=(1,))
        elif metric == "per_gpu_tflops_regression":
            yield _scaling(row, T5, 1 - float(row.text("value")) / 100, fewest=8, batches=(8, 16))
        elif metric in _UNSTATED:
            yield Unstated((row.id,), f"{row.text('model')} {row.text('strategy')} {metric}", _UNSTATED[metric])


def _scaling(row: Row, model: Model, published: float, *, fewest: int, batches: Sequence[int]) -> Claim:
    """TFLOP/s of a device by those on the fewest devices, with so many sequences on each."""
    return Claim(
        rows=(row.id,),
        of="PyTorch FSDP, section 5.4",
        what=f"{model.name} on {_MOST} GPUs by {fewest}",
        metric="throughput",
        published=(published,),
        pairs=tuple(
            Pair(f"batch {batch} of each", _plan(model, _MOST, batch), _plan(model, fewest, batch)) for batch in batches
        ),
        differs=(FLAT_PARAMETERS,),
    )


def _plan(model: Model, devices: int, sequences: int) -> str:
    draft = Draft("fsdp", f"PyTorch FSDP, {model.name}, {devices} GPUs, batch {sequences} of each")
    return stated(draft, model, devices, sequences).text
