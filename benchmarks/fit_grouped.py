"""Models of matrix products by groups, as of experts, and errors of predicted times.

The kernels of `torch._grouped_mm` are slower than those of single products, and the slower the fewer rows a group has.
Of published measurements of bf16 (`results/grouped_products.json`): of Hopper's GPUs all are fitted. Of the B200 there
are 80 shapes of Transformer Engine's kernels (`simumax_op_efficiency.csv`), which are fitted, and eight of torch's own,
by which these times are scaled. `fit_profiles.py` writes the models into the profiles. Needs no GPU.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from fit_kernels import Row, product, product_table
from scipy.optimize import minimize

from legoai.cost.kernels.kinds import Product
from legoai.cost.kernels.roofline import ProductCurve
from legoai.cost.machine.kernel_time import seconds_of
from legoai.cost.profiles import profile

MEASURED = Path(__file__).parent / "results" / "grouped_products.json"
RATE = "bf16"
Measurement: TypeAlias = tuple[Sequence[Product], float]
"""Products one after another, and their seconds."""


def measurements(*devices: str) -> Iterator[tuple[Measurement, str]]:
    """What was measured on some devices, with the source."""
    for one in json.loads(MEASURED.read_text(encoding="utf-8"))["measurements"]:
        for groups, rows, k, n, us in one["rows"] if one["device"] in devices else ():
            group = rows // groups
            forward = product(groups, group, n, k, RATE, group=group)
            to_input, to_weight = (product(groups, *of, RATE, group=group) for of in ((group, k, n), (k, n, group)))
            parts = {"forward": [forward], "backward": [to_input, to_weight], "both": [forward, to_input, to_weight]}
            yield (parts[one["pass"]], us * 1e-6), one["source"]


def fitted(dense: dict[str, Any], found: Sequence[Measurement]) -> dict[str, Any]:
    """The curve of single products with the rate, and the longer groups, that predict some measurements best."""

    def curve(values: Sequence[float]) -> dict[str, Any]:
        rate, more = (math.exp(value) for value in values)
        return {**dense, "efficiency": rate, "sustained": None, "more_of_group": more}

    def loss(values: Sequence[float]) -> float:
        formula = ProductCurve.read(curve(values))
        return statistics.fmean(abs(math.log(seconds / sum(map(formula.seconds, work)))) for work, seconds in found)

    best = min(
        (minimize(loss, [math.log(0.6), math.log(more)], method="Nelder-Mead") for more in (50.0, 200.0)),
        key=lambda one: float(one.fun),
    )
    known = curve(best.x)
    return {**known, "efficiency": round(known["efficiency"], 4), "more_of_group": round(known["more_of_group"], 1)}


def of_hopper(dense: dict[str, Any]) -> dict[str, Any]:
    """The model of a profile of an H100, by the measurements of its processor; ``dense`` is that of single products."""
    return {"curve": fitted(dense, [one for one, _ in measurements("h100_sxm", "h200")]), "table": None, "forest": None}


def of_b200(dense: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """The model of the profile of a B200: ``rows`` are of other kernels, which torch's scale.

    The gradients of weights among them are added to sums in single precision, which torch's kernels do not.
    """
    others = [row for row in rows if row.work.grouped and row.work.group != row.work.k]
    curve = fitted(dense, [([row.work], row.seconds) for row in others])
    formula = ProductCurve.read(curve)
    slower = [seconds / sum(map(formula.seconds, work)) for (work, seconds), _ in measurements("b200")]
    return {
        "curve": curve, "table": product_table(others, formula, grouped=True), "forest": None,
        "scale": round(statistics.median(slower), 4),
        "derived": f"Transformer Engine's products by groups, {statistics.median(slower):.3f} of their times",
    }  # fmt: skip


def main() -> None:
    """Print the models of the shipped profiles, and the errors of their predictions."""
    for device in ("h100_sxm", "h200", "b200"):
        known = profile(device)
        one = known.products[f"{RATE} grouped"]
        print(
            f"{device}: {one.curve.efficiency / one.scale:.3f} of the peak, groups longer by {one.curve.more_of_group}"
        )
        errors: defaultdict[str, list[float]] = defaultdict(list)
        for (work, seconds), source in measurements(device):
            predicted = sum(seconds_of(part, known)[0] for part in work)
            errors[source.split(" of ")[0].split(":", 2)[1].removeprefix("//")].append(predicted / seconds - 1)
        for source, of_products in sorted(errors.items()):
            size, bias = statistics.fmean(map(abs, of_products)), statistics.fmean(of_products)
            print(f"  {source}: {len(of_products)}, mean error {size:.1%}, bias {bias:+.1%}")


if __name__ == "__main__":
    main()
