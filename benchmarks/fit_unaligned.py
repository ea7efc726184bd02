"""Rates of matrix products whose rows are not aligned to 16 bytes, and errors of predicted times.

Of published measurements (`results/unaligned_products.json`): sweeps of one dim on an A100, and a few products on an
H100. Operands are unaligned where the summed dim is, or in `torch.mm` the columns; the result where its columns are.
`fit_profiles.py` writes the rates into the profiles. Needs no GPU.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from legoai.cost.kernels.kinds import ALIGNED, Product
from legoai.cost.machine.kernel_time import narrow_rate, seconds_of
from legoai.cost.profiles import profile

MEASURED = Path(__file__).parent / "results" / "unaligned_products.json"
ITEM_BYTES = 2
A100 = "https://github.com/EleutherAI/cookbook, sizing/results of 25 December 2023, fp16: benchmarks/fit_unaligned.py"
H100 = "https://github.com/meta-pytorch/float8_experimental/pull/145, bf16: benchmarks/fit_unaligned.py"


def rows(device: str) -> Iterator[tuple[Product, float, str]]:
    """The products that were measured on a device, with their seconds and the source."""
    for one in json.loads(MEASURED.read_text(encoding="utf-8"))["measurements"]:
        for m, n, k, tflops in one["rows"] if one["device"] == device else ():
            operands = (k, n) if one["layout"] == "mm" else (k,)
            product = Product(
                batch=1, m=m, n=n, k=k, rate="bf16", bytes=ITEM_BYTES * (m * k + k * n + m * n),
                operands_aligned=math.gcd(ALIGNED, *(ITEM_BYTES * size for size in operands)),
                result_aligned=math.gcd(ALIGNED, ITEM_BYTES * n),
            )  # fmt: skip
            yield product, product.flops / (tflops * 1e12), one["source"]


def rates(device: str) -> dict[str, float]:
    """The profile's constants: of an A100 the medians of products that differ in one dim, of an H100 the largest one's.

    A product has a smaller rate where it is too short for its start and end not to matter.
    """
    curve = profile(device).products["bf16"].curve
    found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for product, seconds, _ in rows(device):
        name = narrow_rate(product)
        if name is not None and ALIGNED in (product.operands_aligned, product.result_aligned):
            found[name].append((product.flops, product.flops * curve.waste(product) / (seconds - curve.floor)))
    if device == "h100_sxm":
        return {name: max(values)[1] for name, values in found.items()}
    return {name: statistics.median(rate for _, rate in values) for name, values in found.items()}


def constants(device: str) -> dict[str, dict[str, Any]]:
    """The constants of a profile, of a GPU of the A100's or the H100's processor.

    Those of an H100 that were not measured are the A100's, scaled as the one that was.
    """
    measured = {name: {"value": round(rate, -10), "source": A100} for name, rate in rates("a100_sxm80").items()}
    if device.startswith("a100"):
        return measured
    [(known, rate)] = rates("h100_sxm").items()
    faster = rate / measured[known]["value"]
    scaled = f"{A100}, times {faster:.2f}, by which operands aligned to 2 bytes are faster on an H100"
    return {
        name: {"value": round(faster * item["value"], -10), "source": H100 if name == known else scaled}
        for name, item in measured.items()
    }


def main() -> None:
    """Print the rates, and the error of the predictions with those of the shipped profiles."""
    for device in ("a100_sxm80", "h100_sxm"):
        known = profile(device)
        errors: defaultdict[str, list[float]] = defaultdict(list)
        for product, seconds, source in rows(device):
            found = (
                f"{(narrow_rate(product) or 'aligned').removesuffix('_flops_per_second')}, {source.split(' of ')[0]}"
            )
            errors[found].append(seconds_of(product, known)[0] / seconds - 1)
        for name, rate in sorted(rates(device).items()):
            print(f"{device}: {name} = {rate / 1e12:.1f} TFLOP/s")
        for what, of_products in sorted(errors.items()):
            size, bias = statistics.fmean(map(abs, of_products)), statistics.fmean(of_products)
            print(f"  {what}: {len(of_products)} products, mean error {size:.1%}, bias {bias:+.1%}")


if __name__ == "__main__":
    main()
