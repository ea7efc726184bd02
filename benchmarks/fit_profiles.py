"""Fit the shipped device profiles to published measurements: `fit_profiles.py DIRECTORY [--out FOLDER] [NAME …]`.

DIRECTORY holds the CSV files of measurements, which are not in this repository; each begins with comments on where it
is from. Needs scikit-learn and scipy (`pip install -e '.[fit]'`); what is written needs neither.

A fifth of the rows, chosen by the SHA-256 of their id, is held out: the errors in a profile are on those rows, of a fit
that did not see them. What is shipped is then fitted on all rows. Rows are dropped where a file calls them suspect, and
where their hardware is not in the catalogue. The cpu's profile is measured, not fitted: `legoai calibrate` writes it.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fit_kernels import (
    Row,
    attention_model,
    both_rows,
    evaluate,
    forward_rows,
    measured_products,
    product,
    product_model,
    simumax_attention,
    simumax_products,
    xla_products,
)
from fit_network import carry, fit_fabrics, fit_links

from legoai.cost.kernels import seconds_of
from legoai.cost.kernels.roofline import AttentionCurve
from legoai.cost.profiles import from_document, write_document
from legoai.specs.cluster import Device, device

HERE = Path(__file__).resolve().parent
MADE = "2026-11-21"
AZURE = "https://github.com/Azure/AI-benchmarking-guide, Azure_Results"
XLA = "xla_gemm_perf_table.csv: default matrix product table of XLA:GPU, https://github.com/openxla/xla (August 2026)"
SIMUMAX = "simumax_op_efficiency.csv: operator efficiencies of https://github.com/MooreThreads/SimuMax @4dcaae5"
FLASH = "kernels_gemm_attention.csv: figures of https://github.com/Dao-AILab/flash-attention and the FA3 paper"

AZURE_A100 = (
    (1024, 1024, 1024, 119.4), (2048, 2048, 2048, 221.8), (4096, 4096, 4096, 228.0), (8192, 8192, 8192, 253.7),
    (16384, 16384, 16384, 256.5), (1024, 2145, 1024, 132.8), (6144, 12288, 12288, 250.8), (802816, 192, 768, 157.8),
)  # fmt: skip
"""m, n, k and TFLOP/s of cuBLASLt on an A100 SXM 80 GB, fp16, after 10,000 warm-up iterations."""

AZURE_H100 = (
    (1024, 1024, 1024, 274.1), (2048, 2048, 2048, 1011.3), (4096, 4096, 4096, 1216.9), (8192, 8192, 8192, 1290.1),
    (16384, 16384, 16384, 1377.3), (32768, 32768, 32768, 1382.2), (1024, 2145, 1024, 410.7),
    (6144, 12288, 12288, 1351.4), (802816, 192, 768, 663.8),
)  # fmt: skip
"""The same of an H100 SXM, fp8."""

STREAM = {
    # Copy, add and dot of BabelStream, in bytes per second.
    "a100_sxm80": (1.61e12, 1.70e12, 1.75e12, f"{AZURE}/ND_A100_v4_results.md"),
    "h100_sxm": (2.90e12, 2.97e12, 3.18e12, f"{AZURE}/ND_H100_v5_results.md (read in a fork)"),
    "h200": (4.01e12, 4.15e12, 4.48e12, f"{AZURE}/ND_H200_v5_results.md"),
}

SUSTAINED = {
    # Share of the datasheet's peak that large products hold when run for long.
    ("h100_sxm", "fp8"): (1382.2 / 1978.9, f"{AZURE}/ND_H100_v5_results.md: 1382.2 TFLOP/s at 32768 cubed"),
    ("h100_sxm", "bf16"): (1382.2 / 1978.9, "derived: the share that fp8 holds on the same device"),
    ("a100_sxm80", "bf16"): (256.5 / 312, f"{AZURE}/ND_A100_v4_results.md: 256.5 TFLOP/s at 16384 cubed, fp16"),
    ("b200", "fp8"): (2906.9 / 5000, f"{AZURE}/ND_GB200_v6_results.md: GB200's share of its own peak"),
    ("b200", "bf16"): (0.6466, f"{SIMUMAX}: the best of its training shapes"),
}

CONSTANTS: dict[str, tuple[float, str]] = {
    "kernel_gap_seconds": (
        0.9e-6,
        "Between two queued kernels, 3.8 less 2.9 microseconds on a V100: "
        "https://developer.nvidia.com/blog/cuda-graphs/ (not re-read)",
    ),
    "dispatch_seconds": (
        6e-6,
        "The host's work for an eager operator, the lower ends of six layers added up; 5 to 25 microseconds are given: "
        "https://jiahuanglin.xyz/all_lessons/gpu_kernel_serving/18_pytorch_to_kernel.html",
    ),
    "nccl_connection_bytes": (
        10_485_760,
        "Buffers of one connection of one channel: https://github.com/NVIDIA/nccl/issues/1685",
    ),
    "cublas_workspace_bytes": (
        33_554_432,
        "PyTorch's default on Hopper and newer, 8 of 4096 KiB; 8.1 MiB before: aten/src/ATen/cuda/CublasHandlePool.cpp "
        "(not re-read)",
    ),
    "compute_slowdown": (
        1.189,
        "Mean over GPT and LLaMA training on 4 A100s, H100s, MI250s and MI210s, at most 1.4: "
        "https://arxiv.org/abs/2507.03114, abstract. Of the whole computation there, of what runs beside a collective "
        "here",
    ),
    "context_bytes": (
        987_842_478,
        "0.92 GiB with all of torch 2.1's kernels loaded, 0.47 GiB with none, on an A100; the upper end: "
        "https://github.com/stas00/ml-engineering, training/performance/README.md",
    ),
    "nccl_communicator_bytes": (
        721_420_288,
        "688 MiB for each communicator of 3 or 4 A100s on NVLink after an all-reduce: "
        "https://github.com/NVIDIA/nccl/issues/964",
    ),
    "nccl_pair_bytes": (
        570_425_344,
        "544 MiB for each communicator of 2 A100s on NVLink after an all-reduce: "
        "https://github.com/NVIDIA/nccl/issues/964",
    ),
    "nccl_all_to_all_peer_bytes": (
        468_571_429,
        "3.28 GB more after the first all-to-all of 8 H100s, for each of 7 peers: "
        "https://github.com/NVIDIA/nccl/issues/1685",
    ),
}

SMALL_WORKSPACE = 8_519_680
"""cuBLAS's workspace before Hopper, 2 of 4096 KiB and 8 of 16 KiB."""

HOST_LINK = {
    # Host to device and back, bytes per second.
    "a100_sxm80": (26.28e9, 26.28e9, f"{AZURE}/ND_A100_v4_results.md; its 6.27 GB/s to the host is held for a mistake"),
    "h100_sxm": (51e9, 52e9, f"{AZURE}/ND_H100_v5_results.md (read in a fork)"),
    "h200": (52e9, 52e9, f"{AZURE}/ND_H200_v5_results.md"),
}


GB200_FLASH2 = 373.9 / 2500
"""Share of the peak: 373.9 TFLOP/s forward, heads 128 wide, batch 2, sequence 8192."""

_AZURE = {"what": "memory bandwidth, large products, host link", "from": AZURE, "dated": "2024-2025"}
_XLA = {"what": "matrix products", "from": XLA, "dated": "2026-08", "torch": None}
H100_SOURCES = [
    _XLA,
    {"what": "fp8 products of training shapes, on an H800 of the same processor", "dated": "2025",
     "from": "kernels_gemm_attention.csv: https://github.com/deepseek-ai/DeepGEMM, history of README.md"},
    {"what": "attention", "from": FLASH, "dated": "2023-2024"},
    _AZURE,
]  # fmt: skip
A100_SOURCES = [
    {"what": "matrix products and attention, on the PCIe card", "from": SIMUMAX, "dated": "2025"},
    {"what": "attention", "from": FLASH, "dated": "2023"},
    _AZURE,
]
B200_SOURCES = [_XLA, {"what": "products and attention of training shapes", "from": SIMUMAX, "dated": "2025"}, _AZURE]

POWER = (500 / 700) ** (1 / 3)
"""Rate at 500 W over that at 700 W, if power is as the cube of the clock: an assumption, no measurement."""

KINDS = ("elementwise", "reduction", "normalisation", "softmax", "embedding", "copy", "fill", "optimizer", "loss")

Document = dict[str, Any]


def main() -> None:
    """Fit the profiles that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--out", type=Path, default=HERE.parent / "cost" / "profiles")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PROFILES)} (default: all)")
    arguments = parser.parse_args()
    for name in arguments.names or [*PROFILES, "fabrics"]:
        if name == "fabrics":
            write_document(arguments.out / "fabrics.json.gz", fit_fabrics(arguments.directory))
            continue
        document = PROFILES[name](arguments.directory)
        write_document(arguments.out / f"{name}.json.gz", document)
        print(name)
        for label, error in document["held_out"].items():
            print(f"  {label:34} " + "  ".join(f"{key} {value}" for key, value in error.items()))


def frame(target: Device, **parts: Any) -> Document:
    """A profile without models."""
    arithmetic = {"fp32": target.peak("fp32"), "fp64": target.peak("fp64")}
    arithmetic |= dict.fromkeys(("bf16", "fp16", "fp8", "tf32"), arithmetic["fp32"])
    constants = {name: {"value": value, "source": source} for name, (value, source) in CONSTANTS.items()}
    if target.name == "a100_sxm80":
        constants["cublas_workspace_bytes"]["value"] = SMALL_WORKSPACE
    if target.name in HOST_LINK:
        down, up, source = HOST_LINK[target.name]
        constants["host_to_device_bytes_per_second"] = {"value": down, "source": source}
        constants["device_to_host_bytes_per_second"] = {"value": up, "source": source}
    return {
        "device": target.name,
        "made": MADE,
        "constants": constants,
        "arithmetic": arithmetic,
        "attention": {},
        "links": {},
        "held_out": {},
        **parts,
    }


def movement(target: Device, share: tuple[float, float, float], source: str, derived: str = "") -> Document:
    """Bandwidth curves by kind from the shares of the datasheet's that copy, add and dot reach."""
    copied, added, read = (part * target.figure("memory.bandwidth_bytes_per_second") for part in share)
    gap = CONSTANTS["kernel_gap_seconds"][0]
    measured = {"copy": copied, "elementwise": added, "reduction": read, "fill": copied}
    return {
        kind: {
            "rate": round(measured.get(kind, added)),
            "floor": gap,
            "source": source,
            "derived": derived or ("" if kind in measured else "the rate of an addition; not measured for this kind"),
        }
        for kind in KINDS
    }


def shares(name: str) -> tuple[tuple[float, float, float], str]:
    """What copy, add and dot reach of the datasheet's bandwidth of a device, and the source."""
    copied, added, read, source = STREAM[name]
    peak = device(name).figure("memory.bandwidth_bytes_per_second")
    return (copied / peak, added / peak, read / peak), source


def with_error(build: Callable[[list[Row]], Document], rows: list[Row], label: str, **notes: Any) -> Document:
    """The document fitted on all rows, with the error on those held out of one fitted on the others."""
    trial = from_document(build([row for row in rows if not row.held]))
    document = build(rows)
    document["held_out"][label] = evaluate(trial, [row for row in rows if row.held], **notes)
    return document


def same_rate(document: Document, source: str, target: str, reason: str) -> None:
    """Give another dtype the products and the attention of one that the tensor cores treat alike."""
    document["products"][target] = {"like": source, "derived": _joined(document["products"][source], reason)}
    for key, model in list(document["attention"].items()):
        implementation, direction, rate = key.split()
        if rate == source:
            like = {"like": key, "derived": _joined(model, reason)}
            document["attention"][f"{implementation} {direction} {target}"] = like


def _joined(model: Document, reason: str) -> str:
    return "; ".join(filter(None, [model.get("derived"), reason]))


def plain_rates(document: Document, target: Device) -> None:
    """Single and double precision, which were not measured: the share of the peak that bf16 products reach."""
    for rate in ("fp32", "fp64", "tf32"):
        if rate not in document["products"]:
            model = copy.deepcopy(document["products"]["bf16"])
            model["curve"]["peak"] = target.peak(rate)
            model["forest"] = model["table"] = None
            model["derived"] = "the share of the peak that bf16 products reach"
            document["products"][rate] = model


def add_links(document: Document, directory: Path, name: str) -> None:
    """Fit the collectives on one host, with their error."""
    document["links"], held = fit_links(directory, name)
    document["held_out"].update(held)


def add_products(document: Document, target: Device, rate: str, rows: list[Row]) -> None:
    """Fit the products of one rate, with their error."""
    share, source = SUSTAINED.get((target.name, rate), (None, ""))

    def build(some: list[Row]) -> Document:
        return {**document, "products": {rate: product_model(some, target, rate, share)}, "held_out": {}}

    fitted = with_error(build, rows, f"products {rate}")
    fitted["products"][rate]["sustained_source"] = source
    document["products"][rate] = fitted["products"][rate]
    document["held_out"].update(fitted["held_out"])


def add_attention(document: Document, target: Device, key: str, rows: list[Row], derived: str = "") -> None:
    """Fit one implementation in one direction, with its error."""

    def build(some: list[Row]) -> Document:
        model = {**attention_model(some, target), "derived": derived}
        return {**document, "attention": {f"{key} bf16": model}, "held_out": {}}

    fitted = with_error(build, rows, f"attention {key}", **({"note": derived} if derived else {}))
    document["attention"].update(fitted["attention"])
    document["held_out"].update(fitted["held_out"])


def derive_attention(document: Document, key: str, like: str, factor: float, reason: str) -> None:
    """An implementation that was not measured: another's curve, its limits multiplied."""
    model = copy.deepcopy(document["attention"][f"{like} bf16"])
    curve = model["curve"]
    curve["limits"] = {name: [limit * factor, *rest] for name, (limit, *rest) in curve["limits"].items()}
    document["attention"][f"{key} bf16"] = {"curve": curve, "table": None, "derived": reason}


def limit_ratio(document: Document, first: str, second: str) -> float:
    """The median ratio of the limits of two implementations, at equal widths and masks."""
    one, two = (document["attention"][f"{key} bf16"]["curve"]["limits"] for key in (first, second))
    return statistics.median(one[key][0] / two[key][0] for key in one if key in two)


def h100(directory: Path) -> Document:
    """H100 SXM."""
    target = device("h100_sxm")
    share, source = shares("h100_sxm")
    document = frame(target, products={}, movement=movement(target, share, source), sources=H100_SOURCES)
    add_links(document, directory, "h100_sxm")
    rows = xla_products(directory, "sm_90")
    add_products(document, target, "bf16", rows["bf16"])
    add_products(document, target, "tf32", rows["tf32"])
    # Large fp8 products of XLA's table on this device exceed the datasheet's peak by up to a third: their operands were
    # not random, so that only those are used whose time is mostly latency.
    small = [row for row in rows["fp8"] if row.work.flops <= 2**31]
    dense = [r for r in measured_products(directory, "H800-SXM5", "DeepGEMM", "fp8") if not r.work.grouped]
    add_products(document, target, "fp8", small + dense + azure_rows(AZURE_H100, "fp8"))
    document["products"]["fp8"]["margin"] = 0.5
    forward = forward_rows(directory, "H100-80GB-SXM5")
    for name in ("flash2", "flash3", "cudnn"):
        add_attention(document, target, f"{name} forward", [row for row in forward if row.work.implementation == name])
    curve = AttentionCurve.read(document["attention"]["flash2 forward bf16"]["curve"])
    backward = [
        Row(name, back, seconds - curve.seconds(ahead))
        for name, ahead, back, seconds in both_rows(directory, "H100-80GB-SXM5")
    ]
    split = "of measured forward and backward together, less the fitted forward"
    add_attention(document, target, "flash2 backward", backward, split)
    slower = limit_ratio(document, "flash2 backward", "flash2 forward")
    for name in ("flash3", "cudnn"):
        reason = f"{name}'s forward at the {slower:.3f} that FlashAttention-2's backward reaches of its forward"
        derive_attention(document, f"{name} backward", f"{name} forward", slower, reason)
    same_rate(document, "bf16", "fp16", "the rate of bf16, which the tensor cores share")
    plain_rates(document, target)
    return document


def rescaled(document: Document, target: Device, *, compute: float, moved: Document, reason: str) -> Document:
    """The profile of a device of the same processor with another memory or power."""
    result = copy.deepcopy(document)
    fresh = frame(target)
    result.update(device=target.name, movement=moved, arithmetic=fresh["arithmetic"], constants=fresh["constants"])
    for rate, model in result["products"].items():
        model["derived"] = _joined(model, reason)
        if "like" in model:
            continue
        curve = model["curve"]
        curve["peak"] = target.peak(rate)
        curve["bandwidth"] = target.figure("memory.bandwidth_bytes_per_second")
        curve["efficiency"] *= compute
        curve["sustained"] = curve["sustained"] and curve["sustained"] * compute
    for model in result["attention"].values():
        model["derived"] = _joined(model, reason)
        if "like" in model:
            continue
        curve = model["curve"]
        curve["bandwidth"] = target.figure("memory.bandwidth_bytes_per_second")
        curve["peak"] = target.peak("bf16")
        curve["limits"] = {key: [limit * compute, *rest] for key, (limit, *rest) in curve["limits"].items()}
    links = "the H100 SXM's, of the same links"
    result["links"] = carry(document["links"], {}, links)
    result["held_out"] = {
        label: {**error, "note": links if label.startswith("links") else f"of the H100 SXM; {reason}"}
        for label, error in result["held_out"].items()
    }
    return result


def h100_96(directory: Path) -> Document:
    """H100 with 96 GB HBM2e at 500 W, of which no kernel was measured."""
    target = device("h100_sxm96")
    share, source = shares("h100_sxm")
    moved = movement(target, share, source, "the shares of the datasheet's bandwidth that the H100 SXM reaches")
    reason = f"the H100 SXM's with {POWER:.3f} of its rate, the cube root of 500 W over 700 W"
    return rescaled(h100(directory), target, compute=POWER, moved=moved, reason=reason)


def h200(directory: Path) -> Document:
    """H200: the processor of the H100, measured in its memory and its links."""
    target = device("h200")
    share, source = shares("h200")
    reason = "the H100 SXM's, of the same processor"
    document = rescaled(h100(directory), target, compute=1.0, moved=movement(target, share, source), reason=reason)
    add_links(document, directory, "h200")
    return document


def a100(directory: Path) -> Document:
    """A100 SXM 80 GB: products measured on the PCIe card and scaled by those of the SXM that are known."""
    target = device("a100_sxm80")
    share, source = shares("a100_sxm80")
    document = frame(target, products={}, movement=movement(target, share, source), sources=A100_SOURCES)
    add_links(document, directory, "a100_sxm80")
    add_products(document, target, "bf16", simumax_products(directory, "A100-PCIe-80GB"))
    error = document["held_out"].pop("products bf16")
    document["held_out"]["products bf16"] = {**error, "note": "on the PCIe card that they were measured on"}
    sxm = azure_rows(AZURE_A100, "bf16")
    formula = from_document(document)
    scale = statistics.median(row.seconds / seconds_of(row.work, formula)[0] for row in sxm[2:])
    model = document["products"]["bf16"]
    model["scale"] = round(scale, 4)
    model["derived"] = f"measured on the A100 PCIe; {scale:.3f} of the time by the SXM's own products of {AZURE}"
    document["held_out"]["products bf16 on SXM"] = evaluate(
        from_document(document), sxm, note="the scale was fitted on six of the eight"
    )
    pairs = both_rows(directory, "A100-80GB-SXM4")
    pcie = simumax_attention(directory, "A100-PCIe-80GB", "flash2")
    ratio = pcie_ratio(pcie)
    for direction, faster in (("forward", ratio), ("backward", 1.0)):
        rows = []
        for name, ahead, back, seconds in pairs:
            rate = (ahead.flops / ratio + back.flops) / seconds
            work = ahead if direction == "forward" else back
            rows.append(Row(name, work, work.flops / (rate * faster)))
        note = f"of both directions together, the forward {ratio:.2f} times as fast as the backward on the A100 PCIe"
        add_attention(document, target, f"flash2 {direction}", rows, note)
    same_rate(document, "bf16", "fp16", "the rate of bf16, which the tensor cores share")
    plain_rates(document, target)
    return document


def azure_rows(table: Sequence[tuple[int, int, int, float]], rate: str) -> list[Row]:
    """The rows of Azure's tables."""
    rows = []
    for m, n, k, teraflops in table:
        work = product(1, m, n, k, rate)
        rows.append(Row(f"azure-{rate}-{m}-{n}-{k}", work, work.flops / (teraflops * 1e12)))
    return rows


def pcie_ratio(rows: Sequence[Row]) -> float:
    """Rate of the forward over that of the backward, at equal shapes."""
    rates: dict[tuple[Any, ...], dict[bool, float]] = {}
    for row in rows:
        key = (row.work.heads, row.work.key_heads, row.work.queries, row.work.head_dim)
        rates.setdefault(key, {})[row.work.backward] = row.work.flops / row.seconds
    return statistics.median(pair[False] / pair[True] for pair in rates.values() if len(pair) == 2)


def b200(directory: Path) -> Document:
    """B200."""
    target = device("b200")
    share, source = shares("h200")
    derived = "the shares of the datasheet's bandwidth that the H200 reaches"
    document = frame(target, products={}, movement=movement(target, share, source, derived), sources=B200_SOURCES)
    add_links(document, directory, "b200")
    rows = xla_products(directory, "sm_100_B200")
    add_products(document, target, "bf16", rows["bf16"] + simumax_products(directory, "B200"))
    add_products(document, target, "tf32", rows["tf32"])
    add_products(document, target, "fp8", rows["fp8"])
    document["products"]["mxfp8"] = {
        "like": "fp8",
        "derived": "the rate of fp8, as in the datasheet; its scales are read beside its elements",
    }
    measured = simumax_attention(directory, "B200", "cudnn")
    for backward, direction in ((False, "forward"), (True, "backward")):
        add_attention(document, target, f"cudnn {direction}", [r for r in measured if r.work.backward == backward])
        factor = GB200_FLASH2 / document["attention"]["cudnn forward bf16"]["curve"]["limits"]["128 causal"][0]
        reason = f"cuDNN's curve at {GB200_FLASH2:.3f} of the peak, as FlashAttention-2 reaches on a GB200: {AZURE}"
        derive_attention(document, f"flash2 {direction}", f"cudnn {direction}", factor, reason)
    same_rate(document, "bf16", "fp16", "the rate of bf16, which the tensor cores share")
    plain_rates(document, target)
    return document


PROFILES: dict[str, Callable[[Path], Document]] = {
    "h100_sxm": h100,
    "h100_sxm96": h100_96,
    "a100_sxm80": a100,
    "h200": h200,
    "b200": b200,
}

if __name__ == "__main__":
    main()
