"""Fit the models of attention in a profile, and derive those of implementations that were not measured."""

from __future__ import annotations

import copy
import statistics
from dataclasses import replace
from pathlib import Path

from fit_gpu import about, attention_slowdown, notes
from fit_kernels import (
    Document,
    Pair,
    Row,
    attention_model,
    both_rows,
    efficient_rows,
    forward_rows,
    of_direction,
    with_error,
)

from legoai.cost.kernels.roofline import AttentionCurve
from legoai.specs.cluster import Device

FIRST_FLASH_ATTENTION = (
    "FlashAttention-1, as fast as the memory-efficient kernel by the ratio of the two on an A100 at equal widths and "
    "masks; for published runs of it (benchmarks/validation), as no plan names it"
)


def add_slower_attention(document: Document) -> None:
    """What the power limit costs long attention in a training step."""
    slower, plans = attention_slowdown()
    source = f"long attention in steps of {plans} plans at the power limit, over its time alone: {about()}"
    document["constants"]["attention_slowdown"] = {"value": round(slower, 4), "source": source}


def add_attention(document: Document, target: Device, key: str, rows: list[Row], derived: str = "") -> None:
    """Fit one implementation in one direction, with its error."""

    def build(some: list[Row]) -> Document:
        model = {**attention_model(some, target), "derived": derived}
        return {**document, "attention": {f"{key} bf16": model}, "held_out": {}}

    fitted = with_error(build, rows, f"attention {key}", **({"note": derived} if derived else {}))
    document["attention"].update(fitted["attention"])
    document["held_out"].update(fitted["held_out"])


def add_efficient(
    document: Document, target: Device, pairs: list[Pair], ratio: float, derived: str, *, name: str = "efficient"
) -> None:
    """Fit torch's memory-efficient attention, or one like it, of which only the sum of both directions was measured."""
    note = f"of both directions together, the forward {ratio:.2f} times as fast as the backward, as of FlashAttention-2"
    for direction in ("forward", "backward"):
        rows = [
            replace(row, work=replace(row.work, implementation=name)) for row in of_direction(pairs, direction, ratio)
        ]
        add_attention(document, target, f"{name} {direction}", rows, notes(derived, note))


def derive_attention(document: Document, key: str, like: str, factor: float, reason: str) -> None:
    """An implementation that was not measured: the curve of another one, with its limits multiplied."""
    model = copy.deepcopy(document["attention"][f"{like} bf16"])
    curve = model["curve"]
    curve["limits"] = {name: [limit * factor, *rest] for name, (limit, *rest) in curve["limits"].items()}
    document["attention"][f"{key} bf16"] = {"curve": curve, "table": None, "derived": reason}


def derive_unmasked(document: Document, key: str, like: str) -> None:
    """Limits without a causal mask of an implementation that was measured with one, in proportion to another one's."""
    model, other = (document["attention"][f"{name} bf16"] for name in (key, like))
    limits, known = model["curve"]["limits"], other["curve"]["limits"]
    for name, (limit, sequence, units) in list(limits.items()):
        full = name.replace("causal", "full")
        if name in known and full in known and full not in limits:
            (a, b, _), (c, d, _) = known[full], known[name]
            limits[full] = [round(limit * a / c, 5), round(sequence * b / d, 5), units]
    model["unmasked"] = f"in proportion to those of {like}, with and without a mask"


def limit_ratio(document: Document, first: str, second: str) -> float:
    """The median ratio of the limits of two implementations, at equal widths and masks."""
    one, two = (document["attention"][f"{key} bf16"]["curve"]["limits"] for key in (first, second))
    return statistics.median(one[key][0] / two[key][0] for key in one if key in two)


def attention_of_paper(document: Document, target: Device, directory: Path) -> tuple[Document, list[Row]]:
    """FlashAttention-2 on an H100 by published figures alone, and its backward: both directions less the forward."""
    found: Document = {**document, "attention": {}, "held_out": {}}
    forward = [row for row in forward_rows(directory, "H100-80GB-SXM5") if row.work.implementation == "flash2"]
    add_attention(found, target, "flash2 forward", forward)
    curve = AttentionCurve.read(found["attention"]["flash2 forward bf16"]["curve"])
    both = both_rows(directory, "H100-80GB-SXM5")
    backward = [Row(name, back, seconds - curve.seconds(ahead)) for name, ahead, back, seconds in both]
    add_attention(found, target, "flash2 backward", backward)
    return found, backward


def add_first_flash_attention(document: Document, target: Device, directory: Path, of_paper: Document) -> None:
    """FlashAttention-1 by published measurements, of which only the sum of both directions is known.

    Args:
        document: to which it is added.
        target: device.
        directory: folder of the CSV files.
        of_paper: FlashAttention-2 by published measurements, whose directions differ as much.
    """
    faster = 1 / limit_ratio(of_paper, "flash2 backward", "flash2 forward")
    pairs = efficient_rows(directory, "H100-80GB-SXM5")
    add_efficient(document, target, pairs, faster, FIRST_FLASH_ATTENTION, name="flash1")
