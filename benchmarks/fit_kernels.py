"""Fit the models of matrix products and of attention to rows of published measurements."""

from __future__ import annotations

import csv
import hashlib
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from scipy.optimize import least_squares, minimize
from sklearn.ensemble import ExtraTreesRegressor

from legoai.cost.kernels.features import PRODUCT_FEATURES, product_features
from legoai.cost.kernels.kinds import Attention, Product
from legoai.cost.kernels.roofline import AttentionCurve, ProductCurve
from legoai.cost.machine.kernel_time import seconds_of
from legoai.cost.profiles import Profile, from_document
from legoai.specs.cluster import Device

Document: TypeAlias = dict[str, Any]

TREES, LEAF = 16, 2
TILES = ((128, 256), (128, 128), (64, 128), (64, 64))
BYTES = {"bf16": 2, "fp16": 2, "fp8": 1, "tf32": 4, "fp32": 4}


@dataclass(frozen=True)
class Row:
    """A measurement: its id, the kernel's work, and its seconds."""

    id: str
    work: Any
    seconds: float

    @property
    def held(self) -> bool:
        return int(hashlib.sha256(self.id.encode()).hexdigest(), 16) % 5 == 0


def read(directory: Path, name: str) -> list[dict[str, str]]:
    """The rows of a file, without comments and rows that it marks as suspect."""
    with (directory / name).open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    return [row for row in rows if not re.search("SUSPECT|DUPLICATE", row.get("notes") or "")]


def product(batch: int, m: int, n: int, k: int, rate: str, *, out: int | None = None, group: int = 0) -> Product:
    size = BYTES[rate]
    moved = batch * (size * (m * k + k * n) + (out or max(2, size)) * m * n)
    return Product(batch=batch, m=m, n=n, k=k, rate=rate, bytes=moved, group=group)


def xla_products(directory: Path, device_key: str) -> dict[str, list[Row]]:
    """Products of XLA's table by rate; fp8 rows of one shape differ in their input formats."""
    found: dict[str, list[Row]] = {}
    for row in read(directory, "xla_gemm_perf_table.csv"):
        if row["device"] != device_key:
            continue
        rate = {"bf16": "bf16", "f32x": "tf32"}.get(row["dtype"][:4], "fp8")
        sizes = [int(row[name]) for name in ("batch", "m", "n", "k")]
        found.setdefault(rate, []).append(Row(row["id"], product(*sizes, rate), float(row["time_us"]) * 1e-6))
    return found


def simumax_products(directory: Path, gpu: str) -> list[Row]:
    rows = []
    for row in read(directory, "simumax_op_efficiency.csv"):
        if row["gpu"] != gpu or "matmul" not in row["op"]:
            continue
        if row["op"] == "matmul":
            batch, m, n, k = (int(row[name]) for name in ("b", "m", "n", "k"))
            work = product(batch, m, n, k, "bf16", out=4 if row["out_dtype"] == "fp32" else 2)
        else:
            sizes = dict(re.findall(r"(\w+)=(\w+)", row["shape"]))
            groups, m, n, k = (int(sizes[name]) for name in ("ng", "M", "N", "K"))
            group = m
            m, n, k = {"fwd": (m, n, k), "bwd_grad_act": (m, k, n), "bwd_grad_w": (n, k, m)}[sizes["stage"]]
            work = product(groups, m, n, k, "bf16", group=group)
        rows.append(Row(row["id"], work, work.flops / (float(row["tflops"]) * 1e12)))
    return rows


def measured_products(directory: Path, gpu: str, impl: str, rate: str) -> list[Row]:
    rows = []
    for row in read(directory, "kernels_gemm_attention.csv"):
        if row["gpu"] != gpu or impl not in row["impl"] or not row["m"] or "gemm" not in row["kernel"]:
            continue
        groups = re.search(r"groups=(\d+)", row["extra"] or "")
        batch = int(groups[1]) if groups else 1
        work = product(batch, int(row["m"]), int(row["n"]), int(row["k"]), rate, group=int(row["m"]) if groups else 0)
        rows.append(Row(row["id"], work, work.flops / (float(row["tflops"]) * 1e12)))
    return rows


def fit_product_curve(rows: Sequence[Row], target: Device, rate: str) -> dict[str, Any]:
    """Floor, efficiency and the tiles' rates that minimise the absolute logarithmic error."""
    peak = target.peak({"tf32": "tf32"}.get(rate, rate))
    base = {
        "peak": peak,
        "bandwidth": target.figure("memory.bandwidth_bytes_per_second"),
        "sustained": None,
        "processors": int(target.figure("processor.multiprocessors")),
        "split": 256,
    }

    def curve(values: Sequence[float]) -> ProductCurve:
        floor, efficiency, *rates = (math.exp(value) for value in values)
        tiles = [(*TILES[0], 1.0), *((*tile, rate) for tile, rate in zip(TILES[1:], rates, strict=True))]
        return ProductCurve.read({**base, "floor": floor, "efficiency": efficiency, "tiles": tiles})

    def loss(values: Sequence[float]) -> float:
        fitted = curve(values)
        return float(np.mean([abs(math.log(row.seconds / fitted.seconds(row.work))) for row in rows]))

    start = [math.log(4e-6), math.log(0.75), math.log(0.95), math.log(0.7), math.log(0.45)]
    best = minimize(loss, start, method="Nelder-Mead", options={"maxiter": 160, "xatol": 1e-3, "fatol": 1e-4})
    fitted = curve(best.x)
    return {
        **base,
        "floor": round(fitted.floor, 9),
        "efficiency": round(fitted.efficiency, 5),
        "tiles": [[rows, columns, round(share, 4)] for rows, columns, share in fitted.tiles],
    }


def grow(points: np.ndarray, ratios: np.ndarray, names: tuple[str, ...]) -> dict[str, Any]:
    """A forest as arrays."""
    forest = ExtraTreesRegressor(TREES, min_samples_leaf=LEAF, random_state=0, n_jobs=2).fit(points, ratios)
    flat: dict[str, list[Any]] = {key: [] for key in ("feature", "threshold", "left", "right", "value")}
    roots = []
    for estimator in forest.estimators_:
        tree, start = estimator.tree_, len(flat["feature"])
        roots.append(start)
        leaf = tree.children_left < 0
        flat["feature"] += [-1 if end else int(one) for end, one in zip(leaf, tree.feature, strict=True)]
        flat["threshold"] += [
            0.0 if end else round(float(one), 4) for end, one in zip(leaf, tree.threshold, strict=True)
        ]
        flat["left"] += [0 if end else int(one) + start for end, one in zip(leaf, tree.children_left, strict=True)]
        flat["right"] += [0 if end else int(one) + start for end, one in zip(leaf, tree.children_right, strict=True)]
        flat["value"] += [
            round(float(one), 4) if end else 0.0 for end, one in zip(leaf, tree.value[:, 0, 0], strict=True)
        ]
    low, high = points.min(axis=0), points.max(axis=0)
    return {
        "names": list(names), "roots": roots, **flat,
        "low": [round(float(v), 4) for v in low], "high": [round(float(v), 4) for v in high],
    }  # fmt: skip


def product_model(rows: Sequence[Row], target: Device, rate: str) -> dict[str, Any]:
    """The models of short runs."""
    curve = fit_product_curve(rows, target, rate)
    formula = ProductCurve.read(curve)
    points = np.array([product_features(row.work, formula.processors) for row in rows])
    ratios = np.array([math.log(row.seconds / formula.seconds(row.work)) for row in rows])
    return {"curve": curve, "forest": grow(points, ratios, PRODUCT_FEATURES), "table": product_table(rows, formula)}


def product_table(rows: Sequence[Row], formula: ProductCurve, *, grouped: bool = False) -> dict[str, Any]:
    """Measured shapes, each once, with the median of its ratios."""
    ratios: dict[tuple[float, ...], list[float]] = {}
    for row in rows:
        if row.work.grouped == grouped:
            point = tuple(round(math.log2(v), 4) for v in (row.work.batch, row.work.m, row.work.n, row.work.k))
            ratios.setdefault(point, []).append(math.log(row.seconds / formula.seconds(row.work)))
    points = sorted(ratios)
    return {"points": points, "ratios": [round(float(np.median(ratios[point])), 4) for point in points], "reach": 0.1}


def errors(measured: Iterable[float], predicted: Iterable[float], **notes: Any) -> dict[str, Any]:
    ratio = np.array(list(predicted)) / np.array(list(measured))
    error = np.abs(ratio - 1)
    return {
        "rows": len(error),
        "median": round(float(np.median(error)), 4),
        "mean": round(float(error.mean()), 4),
        "p90": round(float(np.quantile(error, 0.9)), 4),
        "bias": round(float(np.median(ratio)) - 1, 4),
        **notes,
    }


def evaluate(profile: Profile, rows: Sequence[Row], **notes: Any) -> dict[str, Any]:
    """Error of a profile's predictions on rows."""
    return errors([row.seconds for row in rows], [seconds_of(row.work, profile)[0] for row in rows], **notes)


def with_error(build: Callable[[list[Row]], Document], rows: list[Row], label: str, **notes: Any) -> Document:
    """The document fitted on all rows, and the error on held-out rows of a document fitted on the others."""
    trial = from_document(build([row for row in rows if not row.held]))
    document = build(rows)
    document["held_out"][label] = evaluate(trial, [row for row in rows if row.held], **notes)
    return document


def short_runs(profile: Profile) -> Profile:
    """The profile of a device without a power limit, as in the short runs of tables of products."""
    products = {
        rate: replace(model, curve=replace(model.curve, sustained=None)) for rate, model in profile.products.items()
    }
    return replace(profile, products=products, answers={})


def azure_rows(table: Sequence[tuple[int, int, int, float]], rate: str) -> list[Row]:
    """The rows of Azure's tables."""
    rows = []
    for m, n, k, teraflops in table:
        work = product(1, m, n, k, rate)
        rows.append(Row(f"azure-{rate}-{m}-{n}-{k}", work, work.flops / (teraflops * 1e12)))
    return rows


def pcie_ratio(rows: Sequence[Row]) -> float:
    """Ratio of the forward's rate to the backward's, at equal shapes."""
    rates: dict[tuple[Any, ...], dict[bool, float]] = {}
    for row in rows:
        key = (row.work.heads, row.work.key_heads, row.work.queries, row.work.head_dim)
        rates.setdefault(key, {})[row.work.backward] = row.work.flops / row.seconds
    return statistics.median(pair[False] / pair[True] for pair in rates.values() if len(pair) == 2)


def flash_attention(row: dict[str, str], *, backward: bool, rate: str, impl: str) -> Attention:
    batch, heads, sequence, width = (int(row[name]) for name in ("batch", "n_heads", "seq_len", "head_dim"))
    moved = 2 * batch * heads * sequence * width * (8 if backward else 4)
    return Attention(
        batch=batch, heads=heads, key_heads=heads, queries=sequence, keys=sequence, head_dim=width, value_dim=width,
        causal=row["causal"] == "1", backward=backward, rate=rate, implementation=impl, bytes=moved,
    )  # fmt: skip


IMPLEMENTATIONS = {"FlashAttention-2": "flash2", "FlashAttention-3": "flash3", "cuDNN": "cudnn"}


def papers_flops(work: Attention) -> float:
    """Operations as counted by the FlashAttention papers: half for a causal mask, 2.5 times for a backward."""
    forward = 4.0 * work.batch * work.heads * work.queries * work.keys * work.head_dim
    return forward * (0.5 if work.causal else 1) * (2.5 if work.backward else 1)


def forward_rows(directory: Path, gpu: str) -> list[Row]:
    """Rows of the forward alone, from the FlashAttention-3 paper's figures."""
    rows = []
    for row in read(directory, "kernels_gemm_attention.csv"):
        impl = IMPLEMENTATIONS.get(row["impl"])
        if row["kernel"] == "attention" and row["gpu"] == gpu and row["direction"] == "fwd" and impl:
            work = flash_attention(row, backward=False, rate="bf16", impl=impl)
            rows.append(Row(row["id"], work, papers_flops(work) / (float(row["tflops"]) * 1e12)))
    return rows


Pair: TypeAlias = tuple[str, Attention, Attention, float]
"""Id, forward, backward, and the sum of their seconds."""


def both_rows(directory: Path, gpu: str, impl: str = "FlashAttention-2", name: str = "flash2") -> list[Pair]:
    """Forward and backward together, from the FlashAttention-2 paper's figures.

    Args:
        directory: folder of the CSV files.
        gpu: device of the rows.
        impl: implementation of the rows.
        name: name of the implementation in the profile.
    """
    rows = []
    for row in read(directory, "kernels_gemm_attention.csv"):
        if row["gpu"] == gpu and row["direction"] == "fwd+bwd" and row["impl"] == impl and row["tflops"]:
            pair = [flash_attention(row, backward=back, rate="bf16", impl=name) for back in (False, True)]
            seconds = sum(papers_flops(one) for one in pair) / (float(row["tflops"]) * 1e12)
            rows.append((row["id"], pair[0], pair[1], seconds))
    return rows


def of_direction(pairs: Sequence[Pair], direction: str, ratio: float) -> list[Row]:
    """Rows of one direction of pairs, if the forward's rate is ``ratio`` times the backward's."""
    rows = []
    for name, ahead, back, seconds in pairs:
        rate = (ahead.flops / ratio + back.flops) / seconds
        work, faster = (ahead, ratio) if direction == "forward" else (back, 1.0)
        rows.append(Row(name, work, work.flops / (rate * faster)))
    return rows


def efficient_rows(directory: Path, gpu: str) -> list[Pair]:
    """Pairs of xformers' kernel, which is torch's memory-efficient one; where not measured, of FlashAttention-1.

    The seconds of the latter are divided by the median ratio of the two on an A100, at equal widths and masks.
    """
    own = both_rows(directory, gpu, "xformers", "efficient")
    if own:
        return own
    like, efficient = (
        {(ahead.head_dim, ahead.causal, ahead.queries): seconds for _, ahead, _, seconds in rows}
        for rows in (
            both_rows(directory, "A100-80GB-SXM4", "FlashAttention-1", "efficient"),
            both_rows(directory, "A100-80GB-SXM4", "xformers", "efficient"),
        )
    )
    faster = {
        mask: float(np.median([like[key] / efficient[key] for key in like if key[:2] == mask and key in efficient]))
        for mask in {key[:2] for key in like}
    }
    return [
        (name, ahead, back, seconds / faster[ahead.head_dim, ahead.causal])
        for name, ahead, back, seconds in both_rows(directory, gpu, "FlashAttention-1", "efficient")
    ]


def simumax_attention(directory: Path, gpu: str, impl: str) -> list[Row]:
    """Rows of SimuMax's attention.

    SimuMax counts the operations of a full mask, 2.5 times for a backward, although the attention is causal. Under that
    convention its A100 agrees with FlashAttention-2's own figures in both directions.
    """
    rows = []
    for row in read(directory, "simumax_op_efficiency.csv"):
        if row["gpu"] != gpu or not row["op"].startswith("sdp"):
            continue
        sizes = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", row["shape"])}
        backward = row["op"] == "sdp_bwd"
        batch, heads, keys, sequence = (sizes[name] for name in ("batch", "head_num", "kv_head_num", "seq_len"))
        width, value = sizes["qk_head_dim"], sizes["v_head_dim"]
        moved = 2 * batch * sequence * (heads + keys) * (width + value) * (2 if backward else 1)
        work = Attention(
            batch=batch, heads=heads, key_heads=keys, queries=sequence, keys=sequence, head_dim=width, value_dim=value,
            causal=True, backward=backward, rate="bf16", implementation=impl, bytes=moved,
        )  # fmt: skip
        full = 2.0 * batch * heads * sequence**2 * (width + value) * (2.5 if backward else 1)
        rows.append(Row(row["id"], work, full / (float(row["tflops"]) * 1e12)))
    return rows


CARRIED_UNITS = 0.63
"""Units of the A100's backward: the only FlashAttention-2 data here with a varying number of blocks alone."""


def attention_model(rows: Sequence[Row], target: Device) -> dict[str, Any]:
    """Fit a limit for each width and mask, a sequence for each mask and common units; and a table of the residuals.

    The papers' figures have a constant number of tokens, which does not determine a limit on blocks: units are then
    `CARRIED_UNITS`.
    """
    base = {
        "peak": target.peak("bf16"),
        "bandwidth": target.figure("memory.bandwidth_bytes_per_second"),
        "floor": 4e-6,
        "processors": int(target.figure("processor.multiprocessors")),
    }
    keys = sorted({(round((r.work.head_dim + r.work.value_dim) / 2), r.work.causal) for r in rows})
    varied = len({r.work.batch * r.work.heads * r.work.queries // 2048 for r in rows}) > 4

    def limits_of(values: Sequence[float]) -> dict[str, list[float]]:
        sequences, units = {False: values[0], True: values[1]}, values[2] if varied else math.log(CARRIED_UNITS)
        return {
            f"{width} {'causal' if causal else 'full'}": [math.exp(limit), math.exp(sequences[causal]), math.exp(units)]
            for (width, causal), limit in zip(keys, values[3:], strict=True)
        }

    def residuals(values: Sequence[float]) -> list[float]:
        curve = AttentionCurve.read({**base, "limits": limits_of(values)})
        prior = [0.01 * (values[0] - math.log(100)), 0.01 * (values[1] - math.log(350)), 0.01 * (values[2] + 0.5)]
        return [math.log(row.seconds / curve.seconds(row.work)) for row in rows] + prior

    start = [math.log(100), math.log(350), math.log(CARRIED_UNITS), *[math.log(0.6)] * len(keys)]
    best = least_squares(residuals, start, loss="soft_l1", f_scale=0.05)
    limits = {key: [round(value, 5) for value in triple] for key, triple in limits_of(best.x).items()}
    document = {**base, "limits": limits}
    curve = AttentionCurve.read(document)
    points = [
        [
            *(math.log2(v) for v in (row.work.batch * row.work.heads, row.work.queries, row.work.keys)),
            math.log2(row.work.head_dim + row.work.value_dim),
            4.0 * row.work.causal,
        ]
        for row in rows
    ]
    table: dict[tuple[float, ...], list[float]] = {}
    for point, row in zip(points, rows, strict=True):
        key = tuple(round(value, 4) for value in point)
        table.setdefault(key, []).append(math.log(row.seconds / curve.seconds(row.work)))
    known = sorted(table)
    ratios = [round(float(np.median(table[key])), 4) for key in known]
    return {"curve": document, "table": {"points": known, "ratios": ratios, "reach": 0.5}}
