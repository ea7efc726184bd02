"""Rates of convolutions without tensor cores, as shares of those of the vector units, and errors of predicted times.

Of the convolutions that `gpu_kernels.py` measured on an H200 (`results/gpu_kernels_h200.json`), the median over shapes
and dtypes of each class and direction: what `legoai.cost.kernels.convolutions` states. Then the error of the predicted
times of all of them. Needs no GPU.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from legoai.cost.kernels.convolutions import class_of
from legoai.cost.machine.kernel_time import estimate
from legoai.cost.profiles import profile
from legoai.cost.simulated.operators.properties import description, operator, tensors
from legoai.cost.trace.records import Kernel

MEASURED = Path(__file__).parent / "results" / "gpu_kernels_h200.json"
GAP = 0.9e-6
MASKS = {"both": (True, True, False), "input": (True, False, False), "weight": (False, True, False)}


def kernels(row: dict[str, Any]) -> Iterator[tuple[str, Kernel]]:
    """The kernels of a measured row, each with its direction."""
    dtype, size = getattr(torch, row["dtype"]), [row["size"]] * 2
    x = torch.empty(row["batch"], row["channels"], *size, dtype=dtype, device="meta")
    taps = [row["kernel"]] * 2
    weight = torch.empty(row["filters"], row["channels"] // row["groups"], *taps, dtype=dtype, device="meta")
    padding = row["kernel"] // 2 if row["stride"] < row["kernel"] else 0
    rest = ([row["stride"]] * 2, [padding] * 2, [1, 1], False, [0, 0], row["groups"])
    forward, backward = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
    yield "forward", _recorded(forward, (x, weight, None, *rest))
    result = forward(x, weight, None, *rest)
    for direction, mask in MASKS.items():
        yield direction, _recorded(backward, (result, x, weight, None, *rest, mask))


def _recorded(function: Any, arguments: tuple[Any, ...]) -> Kernel:
    out = function(*arguments)
    given, made = list(tensors(arguments)), list(tensors(out))
    said = description(function, operator(function), arguments, {}, inputs=given, fresh=made, out=out)
    return Kernel(stream=0, module="", phase="other", **said)


def main() -> None:
    """Print the shares and the errors."""
    rows = [row for row in json.loads(MEASURED.read_text("utf-8"))["rows"] if row["kind"] == "convolution"]
    device = profile("h200")
    shares: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    errors: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        for direction, kernel in kernels(row):
            seconds = row[f"{direction}_us"] * 1e-6 - GAP
            name = class_of(kernel)
            errors[name, direction].append(estimate(kernel, device)[0] / seconds - 1)
            if name != "product" and direction != "both":
                shares[name, direction].append(kernel.flops / seconds / device.arithmetic["fp32"])
    for (name, direction), found in shares.items():
        print(f"{name:<10} {direction:<8} {statistics.median(found):.4f} of the vector rate ({len(found)})")
    for (name, direction), found in errors.items():
        mean = statistics.mean(map(abs, found))
        span = f"from {min(found):+.0%} to {max(found):+.0%}"
        print(f"{name:<10} {direction:<8} mean error {mean:.0%}, {span} ({len(found)})")


if __name__ == "__main__":
    main()
