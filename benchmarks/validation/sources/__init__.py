"""Frameworks whose published runs are stated as plans, a file for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.validation.rows import Row
from benchmarks.validation.sources import (
    fsdp_paper,
    megatron,
    mosaicml,
    nanotron,
    pytorch_fsdp,
    seeds,
    simplefsdp,
    single_gpu,
    torchtitan,
)
from benchmarks.validation.statements import Stated


@dataclass(frozen=True, slots=True)
class Source:
    """A file of published runs.

    Attributes:
        file: under the folder of measurements, or beside this package.
        convert: makes a plan of a row; the second argument names a device of the catalogue, or is None for the row's.
        fitted: its figures that the shipped profiles were fitted to; empty for none.
        by_rank: another file with the memory of every rank; empty where the source has none.
    """

    file: str
    convert: Callable[[Row, str | None], Stated]
    fitted: str = ""
    by_rank: str = ""


SOURCES: Final[Mapping[str, Source]] = {
    "torchtitan": Source("runs/torchtitan.csv", torchtitan.convert),
    "async_tp": Source(str(Path(__file__).parents[1] / "async_tp.csv"), torchtitan.convert),
    "torchtitan_2025": Source(str(Path(__file__).parents[1] / "torchtitan_2025.csv"), torchtitan.convert),
    "pytorch_fsdp": Source(str(Path(__file__).parents[1] / "pytorch_fsdp.csv"), pytorch_fsdp.convert),
    "nanotron": Source("runs/nanotron_ultrascale_1728.csv", nanotron.convert),
    "nanotron_failed": Source("runs/nanotron_ultrascale_failed_1578.csv", nanotron.convert),
    "vtrain": Source("runs/vtrain_ground_truth.csv", megatron.convert_vtrain),
    "mosaicml": Source("runs/mosaicml_llm_foundry.csv", mosaicml.convert),
    "simumax": Source(
        "runs/simumax_b200.csv",
        megatron.convert_simumax,
        "no step time and no memory of it, but the B200's kernels rest on operators that its authors measured",
        by_rank="runs/simumax_b200_memory_by_rank.csv",
    ),
    "torchtitan_throughput": Source("seeds/torchtitan_throughput.csv", seeds.convert_torchtitan),
    "simplefsdp": Source("seeds/simplefsdp.csv", simplefsdp.convert),
    "fsdp_paper": Source("seeds/fsdp_paper.csv", fsdp_paper.convert),
    "memory_single_gpu": Source("seeds/memory_single_gpu.csv", single_gpu.convert),
    "runtime_single_gpu": Source("seeds/runtime_single_gpu.csv", single_gpu.convert),
    "memory_distributed": Source("seeds/memory_distributed.csv", seeds.convert_distributed),
    "runtime_distributed": Source("seeds/runtime_distributed.csv", seeds.convert_distributed),
}
