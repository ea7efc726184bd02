"""Plans for the tables of the TorchTitan paper and the LegoAI dissertation."""

from __future__ import annotations

import re
from typing import Final

from benchmarks.validation.rows import Row, UnstatedError
from benchmarks.validation.sources import torchtitan
from benchmarks.validation.sources.simplefsdp import LLAMA, META_H100
from benchmarks.validation.statements import Stated

_DATES: Final = dict.fromkeys(("3.1", "3.2", "3.3", "3.4"), "2024-10")
"""Latest months of the tables' runs. The gains of the first four (65.08%, 12.59% and 30%) stand in the paper's abstract
of 9 October 2024. Those with context parallelism have the figures of TorchTitan's tables of December 2024."""


def _llama(row: Row, **fields: object) -> Row:
    """A row of TorchTitan's columns for a Llama 3.1 that a table names by its size."""
    found = re.search(r"(8|70|405)\s*B", row.text("model"), re.IGNORECASE)
    if found is None:
        raise UnstatedError(f"no Llama 3.1 is named: {row.text('model') or 'no model'}")
    known = LLAMA[f"{found[1]}b"]
    size = f"Llama-3.1-{found[1]}B"
    return Row(row.id, {key: str(value) for key, value in {"model": size, "vocab": 128_256, **known, **fields}.items()})


def convert_torchtitan(row: Row, device: str | None = None) -> Stated:
    """State a row of the TorchTitan paper's tables.

    Raises:
        UnstatedError: the row leaves too much open, or has options that the language cannot state.
    """
    if row.text("source") == "003":
        raise UnstatedError("misread digits, by the file's own note; the other paper has the same row")
    shards = row.whole("fsdp")
    precision = row.text("precision")
    return torchtitan.convert(
        _llama(
            row,
            **META_H100,
            n_gpus=row.whole("gpus"),
            gpus_per_node=8,
            dp_shard=shards,
            tp=row.whole("tp", 1),
            pp=row.whole("pp", 1),
            cp=row.whole("cp", 1),
            pp_schedule=row.text("schedule"),
            ac_mode={"selective": "selective_op"}.get(row.text("ac"), row.text("ac")),
            precision="bf16+float8" if "float8" in precision.lower() else "bf16",
            compile=int(row.text("compile") == "yes"),
            micro_batch=row.whole("local_batch"),
            global_batch=row.whole("global_batch", row.whole("local_batch") * shards),
            seq_len=row.whole("seq_len", 8192),
            date=_DATES.get(row.text("table"), "2024-12"),
            source=f"table {row.text('table')}",
            notes="AsyncTP" if row.text("async_tp") == "yes" else "",
        ),
        device,
    )


def convert_distributed(row: Row, device: str | None = None) -> Stated:
    """State a row of the dissertation's tables 4.12, 4.13, 4.15 and 4.16.

    Raises:
        UnstatedError: the row leaves too much open, or has options that the language cannot state.
    """
    gpus, per_host = row.whole("gpus"), row.whole("gpus_per_node", 4)
    tp = per_host if "2D" in row.text("parallelism") else 1
    batch = row.whole("batch" if row.text("batch") else "local_batch")
    return torchtitan.convert(
        _llama(
            row,
            gpu="H100-80GB",
            interconnect="InfiniBand",
            n_gpus=gpus,
            gpus_per_node=per_host,
            dp_shard=gpus // tp,
            tp=tp,
            ac_mode={"selective": "selective_op"}.get(row.text("ac").lower(), row.text("ac").lower()),
            precision="bf16",
            compile=0,
            micro_batch=batch,
            global_batch=batch * (gpus // tp),
            seq_len=row.whole("seq_len"),
            source=f"table {row.text('table')}",
        ),
        device,
    )
