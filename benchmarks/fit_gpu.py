"""Own measurements as rows of a fit: products and attention, on an H100; and as curves of memory-bound kernels.

The files are those that `gpu_kernels.py`, `gpu_steps.py` and `legoai calibrate` wrote on it. Times between kernels of a
full queue include the gap to the next one, which the simulator adds to each kernel: it is subtracted.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fit_figures import CONSTANTS, STREAM
from fit_kernels import Row, product

from legoai.cost.kernels.kinds import Attention, Product
from legoai.cost.kernels.roofline import ProductCurve
from legoai.specs.cluster import Device, device

RESULTS = Path(__file__).parent / "results"
GAP = CONSTANTS["kernel_gap_seconds"][0]
LAYOUTS = {"forward": "m n k", "input": "m k n", "weight": "n k m"}
LONG = 4096
"""Tokens of a sequence in which the first and the last blocks hardly count."""
SHORT_FLOPS = 2e12
"""Of the largest products that were measured at the highest clock; larger ones reached the power limit."""
LARGE = 2**26
"""Bytes of which a cache holds no more than a part."""
MANY_HEADS = 32
FLASH_OPERATORS = {"aten::_flash_attention_forward": "forward", "aten::_flash_attention_backward": "backward"}
POWER_LIMITED = "llama 8b, 16 layers"
"""Plans that ran for half a minute at the power limit."""

MEASURED_ON = "h100_sxm"
SUFFIXES = {"h100_sxm": "", "h200": "_h200"}
"""Of the files of measurements, by the device that was measured."""
LISTS = ("copy foreach", "reduction foreach")
"""Kernels on lists of tensors, which were measured on an H200 alone."""
NOT_MEASURED = {
    "fused": "the rate of an addition, which inductor's kernels reach",
    "loss": "the rate of a fill, which the gradient of its logarithms reaches",
}
CACHE = {"h100_sxm": 50e6, "h100_sxm96": 50e6, "h200": 50e6, "a100_sxm40": 40e6, "a100_sxm80": 40e6, "b200": 126e6}
"""Bytes of the second-level cache, from NVIDIA's architecture papers of Ampere, Hopper and Blackwell."""

Points = list[list[float]]


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text("utf-8"))
    return found


def about(on: str = MEASURED_ON) -> str:
    """The device, versions and date of the measurements."""
    said = _read(f"gpu_kernels{SUFFIXES[on]}.json")
    return f"{said['gpu']['name']}, driver {said['gpu']['driver_version']}, torch {said['torch']}, {said['date']}"


def own_products() -> list[Row]:
    """Products of linear layers in bf16, in three layouts, out of the cache, in short runs."""
    rows = []
    for row in _read("gpu_kernels.json")["rows"]:
        if row["kind"] == "product":
            m, n, k = (row[size] for size in LAYOUTS[row["layout"]].split())
            name = f"own-{row['layout']}-{row['m']}-{row['n']}-{row['k']}"
            if 2.0 * m * n * k > SHORT_FLOPS:
                continue
            rows.append(Row(name, product(1, m, n, k, "bf16"), row["us"] * 1e-6 - GAP))
    return rows


def calibrated_products(rate: str) -> list[Row]:
    """Products of a rate that `legoai calibrate` measured."""
    model = _read("gpu_calibration.json")["products"][rate]
    curve = ProductCurve.read(model["curve"])
    rows = []
    for point, ratio in zip(model["table"]["points"], model["table"]["ratios"], strict=True):
        batch, m, n, k = (round(2**value) for value in point)
        moved = (8 if rate == "fp64" else 4) * batch * (m * k + k * n + m * n)
        work = Product(batch=batch, m=m, n=n, k=k, rate=rate, bytes=moved)
        rows.append(Row(f"calibrated-{rate}-{batch}-{m}-{n}-{k}", work, curve.seconds(work) * math.exp(ratio) - GAP))
    return rows


def own_attention(name: str, *, backward: bool) -> list[Row]:
    """Causal attention by one of torch's implementations, in one direction."""
    rows = []
    for row in _read("gpu_kernels.json")["rows"]:
        if row["kind"] != "attention" or row["implementation"] != name:
            continue
        sizes = [row[size] for size in ("batch", "heads", "length", "width")]
        seconds = row["backward_us" if backward else "forward_us"] * 1e-6
        work = Attention(
            batch=sizes[0], heads=sizes[1], key_heads=sizes[1], queries=sizes[2], keys=sizes[2], head_dim=sizes[3],
            value_dim=sizes[3], causal=True, backward=backward, rate="bf16", implementation=name,
            bytes=2 * (8 if backward else 4) * math.prod(sizes),
        )  # fmt: skip
        if seconds < 1e-3 or work.flops / seconds > 5e13:  # the first backward of one shape chose its kernel
            rows.append(Row(f"own-{name}-{backward}-" + "-".join(map(str, sizes)), work, seconds - GAP))
    return rows


def backward_ratio(name: str) -> float:
    """The median ratio of the backward's rate to the forward's, of long sequences."""
    pairs = zip(own_attention(name, backward=False), own_attention(name, backward=True), strict=True)
    rates = [
        ahead.seconds / ahead.work.flops * back.work.flops / back.seconds
        for ahead, back in pairs
        if ahead.work.queries >= LONG
    ]
    return statistics.median(rates)


def attention_slowdown() -> tuple[float, int]:
    """The median ratio of the time of FlashAttention-2 in steps to its time alone, and the number of plans.

    Those of long sequences and many heads count, which take so long that the power limit has its whole effect. Kernels
    that sum up the gradients of shared keys are no part of it.
    """
    alone = {}
    for row in _read("gpu_kernels.json")["rows"]:
        if row["kind"] == "attention" and row["implementation"] == "flash2":
            shape = row["batch"], row["length"], row["heads"], row["width"]
            alone["forward", shape], alone["backward", shape] = row["forward_us"], row["backward_us"]
    ratios, plans = [], 0
    for row in _read("gpu_steps.json")["rows"]:
        took: dict[tuple[str, tuple[int, ...]], float] = {}
        for kernel in row["kernels"]:
            direction = FLASH_OPERATORS.get(kernel["op"])
            if direction:
                key = direction, tuple(json.loads(kernel["shapes"])[0])
                took[key] = took.get(key, 0.0) + kernel["us"]
        found = [
            took[key] / alone[key] for key in took if key in alone and key[1][1] >= LONG and key[1][2] >= MANY_HEADS
        ]
        ratios += found
        plans += bool(found)
    return statistics.median(ratios), plans


def own_movement(on: str) -> Mapping[str, Points]:
    """Bytes and seconds of memory-bound kernels by kind and form, as measured on a device.

    A softmax of large tensors is that of attention, as in the steps of a plan. A long one is that of a loss, over a
    vocabulary, and a copy without vectors is that to fp32: both as in the steps of the plans. A fused kernel has the
    rate of an addition, as inductor's kernels in these steps have. What is left of a loss is a fill: the gradient of
    its logarithms. An H100's kernels on lists are an H200's, whose memory alone differs.
    """
    curves = _read(f"gpu_calibration{SUFFIXES[on]}.json")["movement"]
    found = {
        name: [[moved, max(seconds - GAP, GAP)] for moved, seconds in curve["points"]] for name, curve in curves.items()
    }
    scores = _kernels(on, "aten::_softmax", ["float"], 8)
    found["softmax"] = _at_least(found["softmax"], scores)
    found["fused"], found["loss"] = found["elementwise"], found["fill"]
    for name, kernels in {
        "softmax long": _kernels(on, "aten::_log_softmax", ["float"], 8),
        "softmax long backward": _kernels(on, "aten::_log_softmax_backward_data", ["float", "float"], 12),
        "copy unvectorised": _kernels(on, "aten::copy_", ["float", "c10::BFloat16"], 6),
    }.items():
        found[name] = _continued(found[name.replace(" long", "")], kernels)
    if on == MEASURED_ON:
        others = own_movement("h200")
        slower = STREAM["h200"][1] / STREAM[MEASURED_ON][1]
        found |= {name: _of_slower_memory(others[name], CACHE[on], slower) for name in LISTS}
    return {name: _increasing(points) for name, points in found.items()}


def _of_slower_memory(points: Points, cache: float, slower: float) -> Points:
    """A curve of a device that differs in its memory: what the cache holds takes as long, the rest ``slower`` times."""
    held = max(seconds for moved, seconds in points if moved <= cache)
    return [[moved, seconds if moved <= cache else held + (seconds - held) * slower] for moved, seconds in points]


def _kernels(on: str, op: str, dtypes: Sequence[str], item: int) -> list[tuple[float, float]]:
    """Bytes and seconds of an operator's kernels in the steps.

    Args:
        on: the device that was measured.
        op: the operator.
        dtypes: of its first operands.
        item: bytes that it moves for each element.
    """
    found: dict[float, list[float]] = {}
    for row in _read(f"gpu_steps{SUFFIXES[on]}.json")["rows"]:
        for kernel in row["kernels"]:
            shapes, types = json.loads(kernel["shapes"]), json.loads(kernel["types"])
            if kernel["op"] == op and types[: len(dtypes)] == dtypes:
                found.setdefault(item * math.prod(shapes[0]), []).append(kernel["us"] * 1e-6)
    return [(moved, statistics.median(times)) for moved, times in sorted(found.items())]


def _at_least(points: Points, kernels: Sequence[tuple[float, float]]) -> Points:
    """A curve whose rate is at large sizes that of an operator's kernels."""
    rate = statistics.median(moved / seconds for moved, seconds in kernels)
    return [[moved, min(seconds, moved / rate) if moved > LARGE else seconds] for moved, seconds in points]


def _continued(points: Points, kernels: Sequence[tuple[float, float]]) -> Points:
    """A curve of the same floor whose rate is that of an operator's kernels."""
    rate = statistics.median(moved / seconds for moved, seconds in kernels if moved > LARGE)
    return [[moved, max(seconds, moved / rate)] for moved, seconds in points]


def _increasing(points: Points) -> Points:
    """The points with times that never fall, as a smaller kernel takes no longer."""
    least = math.inf
    kept = []
    for moved, seconds in reversed(points):
        least = min(least, seconds)
        kept.append([moved, float(f"{least:.4g}")])
    return kept[::-1]


def power_limited() -> Iterator[Row]:
    """Large products in steps at the power limit, by the median of equal kernels."""
    for row in _read("gpu_steps.json")["rows"]:
        if not row["name"].startswith(POWER_LIMITED):
            continue
        for kernel in row["kernels"]:
            shapes = json.loads(kernel["shapes"])
            if kernel["op"] == "aten::mm":
                (m, k), (_, n) = shapes[:2]
                work = product(1, m, n, k, "bf16")
                if work.flops > 2e11:
                    yield Row(f"step-{row['name']}-{m}-{n}-{k}", work, kernel["us"] * 1e-6)


def movement(target: Device, share: tuple[float, float, float], source: str, derived: str = "") -> dict[str, Any]:
    """Curves of memory-bound kernels: own measurements, or the H100's, scaled by an addition's rate and the cache."""
    on = target.name if target.name in SUFFIXES else MEASURED_ON
    cache = CACHE[target.name] / CACHE[on]
    faster = 1.0
    if target.name != on:
        faster = share[1] * target.figure("memory.bandwidth_bytes_per_second") / STREAM[on][1]
        derived = notes(
            derived, f"the H100 SXM's, an addition {faster:.3f} times as fast, the cache {cache:.2f} times as large"
        )
    curves = {}
    for name, points in own_movement(on).items():
        scaled = [[round(moved * cache), float(f"{seconds * cache / faster:.4g}")] for moved, seconds in points]
        moved, seconds = scaled[-1]
        of = "h200" if name in LISTS else on
        curves[name] = {
            "rate": round(moved / seconds),
            "floor": scaled[0][1],
            "points": scaled,
            "source": about(of) if target.name == on else f"{about(of)}; {source}",
            "derived": derived
            or NOT_MEASURED.get(name, "")
            or ("" if of == on else "the H200's, at this memory's rate"),
        }
    return curves


def shares(name: str) -> tuple[tuple[float, float, float], str]:
    """Shares of a device's datasheet bandwidth that copy, add and dot reach, and the source."""
    copied, added, read, source = STREAM[name]
    peak = device(name).figure("memory.bandwidth_bytes_per_second")
    return (copied / peak, added / peak, read / peak), source


def notes(first: str, second: str) -> str:
    return "; ".join(filter(None, [first, second]))
