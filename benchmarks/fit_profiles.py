"""Fit the shipped device profiles to published measurements: `fit_profiles.py DIRECTORY [--out FOLDER] [NAME …]`.

DIRECTORY holds the CSV files of measurements, which are not in this repository; each begins with comments on its
source. The script needs scikit-learn and scipy (`pip install -e '.[fit]'`); the profiles need neither.

A fifth of the rows, chosen by the SHA-256 of their id, is held out: the errors in a profile are those of a fit without
these rows, on these rows. The shipped fit is on all rows. Rows are dropped that a file marks as suspect, or whose
hardware is not in the catalogue. The cpu's profile is measured, not fitted: `legoai calibrate` writes it.
The shipped one is older than the host's calls, whose times are those of `results/host_time.json`.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fit_attention import (
    add_attention,
    add_efficient,
    add_first_flash_attention,
    add_slower_attention,
    attention_of_paper,
    derive_attention,
    derive_unmasked,
)
from fit_figures import (
    A100_SOURCES,
    AZURE,
    AZURE_A100,
    AZURE_H100,
    B200_SOURCES,
    CONSTANTS,
    GB200_FLASH2,
    H100_96_SOURCES,
    H100_SOURCES,
    HOPPER_PRODUCTS,
    HOST_LINK,
    META_FLASH2,
    SMALL_WORKSPACE,
    SUSTAINED,
    TORCHAO,
    TRITON_ON_META,
)
from fit_gpu import (
    GAP,
    POWER_LIMITED,
    about,
    backward_ratio,
    calibrated_products,
    movement,
    notes,
    own_attention,
    own_products,
    power_limited,
    shares,
)
from fit_grouped import of_b200, of_hopper
from fit_kernels import (
    Document,
    Row,
    azure_rows,
    both_rows,
    efficient_rows,
    evaluate,
    forward_rows,
    measured_products,
    of_direction,
    pcie_ratio,
    product_model,
    simumax_attention,
    simumax_products,
    with_error,
    xla_products,
)
from fit_network import carry, fit_fabrics, fit_links
from fit_unaligned import constants as unaligned_constants

from legoai.cost.kernels.kinds import Attention
from legoai.cost.machine.kernel_time import GROUPED, seconds_of
from legoai.cost.profiles import from_document, write_document
from legoai.specs.cluster import Device, device

HERE = Path(__file__).resolve().parent
MADE = "2026-11-30"

OWN = {
    "what": "matrix products, attention and memory-bound kernels, alone and in steps of plans (gpu_kernels.py, "
    "gpu_steps.py, legoai calibrate)",
    "from": about(),
    "dated": about().rpartition(", ")[2],
}


def main() -> None:
    """Fit the named profiles, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="folder of the CSV files of measurements")
    parser.add_argument("--out", type=Path, default=HERE.parent / "cost" / "profiles", help="folder of the profiles")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PROFILES)} (default: all)")
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
    if target.name.startswith("a100"):
        constants["cublas_workspace_bytes"]["value"] = SMALL_WORKSPACE
    if target.name.startswith("h"):
        value, source = HOPPER_PRODUCTS
        constants["product_slowdown"] = {"value": round(value, 4), "source": source}
    if target.name.startswith(("a", "h")):
        constants |= unaligned_constants(target.name)
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


def same_rate(document: Document, source: str, target: str, reason: str) -> None:
    """Copy products and attention to another dtype that the tensor cores execute at the same rate."""
    document["products"][target] = {"like": source, "derived": _joined(document["products"][source], reason)}
    for key, model in list(document["attention"].items()):
        implementation, direction, rate = key.split()
        if rate == source:
            like = {"like": key, "derived": _joined(model, reason)}
            document["attention"][f"{implementation} {direction} {target}"] = like


def _joined(model: Document, reason: str) -> str:
    return notes(model.get("derived") or "", reason)


def plain_rates(document: Document, target: Device) -> None:
    """Products in single and double precision, not measured: the share of the peak that bf16 products reach."""
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
    """Fit the products of one rate, with their error in short runs, as in tables of measurements."""

    def build(some: list[Row]) -> Document:
        return {**document, "products": {rate: product_model(some, target, rate)}, "held_out": {}}

    fitted = with_error(build, rows, f"products {rate}")
    share, source = SUSTAINED.get((target.name, rate), (None, ""))
    model = document["products"][rate] = fitted["products"][rate]
    model["curve"]["sustained"], model["sustained_source"] = share, source
    document["held_out"].update(fitted["held_out"])


def without_gap(rows: list[Row]) -> list[Row]:
    """Measurements from the begin of a kernel to the begin of the next one, without the gap between the two."""
    return [replace(row, seconds=row.seconds - GAP) for row in rows]


def add_power_limit(document: Document) -> None:
    """The share of the peak that large products hold in training steps at the power limit, by steps of own plans."""
    rows, short = list(power_limited()), from_document(document)
    faster = statistics.median(seconds_of(row.work, short)[0] / row.seconds for row in rows)
    model = document["products"]["bf16"]
    model["curve"]["sustained"] = round(faster * model["curve"]["efficiency"], 4)
    model["sustained_source"] = f"large products in steps of {POWER_LIMITED}, {faster:.3f} of short runs: {about()}"


def h100(directory: Path) -> Document:
    """H100 SXM."""
    target = device("h100_sxm")
    share, source = shares("h100_sxm")
    document = frame(target, products={}, movement=movement(target, share, source), sources=[*H100_SOURCES, OWN])
    add_links(document, directory, "h100_sxm")
    rows = xla_products(directory, "sm_90")
    add_products(document, target, "bf16", [*without_gap(rows["bf16"]), *own_products()])
    add_power_limit(document)
    add_products(document, target, "tf32", [*without_gap(rows["tf32"]), *calibrated_products("tf32")])
    for rate in ("fp32", "fp64"):
        add_products(document, target, rate, calibrated_products(rate))
    # Large fp8 products of XLA's table on this device exceed the datasheet's peak by up to a third: their operands were
    # not random, so that only those are used whose time is mostly latency.
    small = [row for row in rows["fp8"] if row.work.flops <= 2**31]
    dense = [r for r in measured_products(directory, "H800-SXM5", "DeepGEMM", "fp8") if not r.work.grouped]
    add_products(document, target, "fp8", small + dense + azure_rows(AZURE_H100, "fp8"))
    document["products"]["fp8"]["margin"] = 0.5
    forward = forward_rows(directory, "H100-80GB-SXM5")
    of_paper, both_masks = attention_of_paper(document, target, directory)
    unmasked = [row for row in both_masks if not row.work.causal]
    for name, backward in (("flash2", unmasked), ("cudnn", []), ("efficient", [])):
        published = [row for row in forward if row.work.implementation == name]
        add_attention(document, target, f"{name} forward", [*published, *own_attention(name, backward=False)])
        add_attention(document, target, f"{name} backward", [*backward, *own_attention(name, backward=True)])
    add_attention(document, target, "flash3 forward", [row for row in forward if row.work.implementation == "flash3"])
    add_first_flash_attention(document, target, directory, of_paper)
    derive_unmasked(document, "cudnn backward", "flash2 backward")
    for direction in ("forward", "backward"):
        derive_unmasked(document, f"efficient {direction}", f"flash1 {direction}")
    slower = backward_ratio("cudnn")
    reason = f"flash3's forward at the {slower:.3f} that cuDNN's backward reaches of its forward"
    derive_attention(document, "flash3 backward", "flash3 forward", slower, reason)
    add_slower_attention(document)
    same_rate(document, "bf16", "fp16", "the rate of bf16, which the tensor cores share")
    plain_rates(document, target)
    document["products"][f"bf16{GROUPED}"] = of_hopper(document["products"]["bf16"]["curve"])
    return document


def rescaled(
    document: Document, target: Device, *, attention: float, moved: Document, reason: str, of: str = "H100 SXM"
) -> Document:
    """The profile of a device of the same processor with another memory or power, and ``attention`` times its rate."""
    held = document["products"]["bf16"]["curve"]["sustained"]
    power = SUSTAINED.get((target.name, "bf16"), (held, ""))[0] / held
    result = copy.deepcopy(document)
    fresh = frame(target)
    result.update(device=target.name, movement=moved, arithmetic=fresh["arithmetic"], constants=fresh["constants"])
    for rate, model in result["products"].items():
        model["derived"] = _joined(model, reason)
        if "like" in model:
            continue
        curve = model["curve"]
        curve["peak"] = target.peak(rate.removesuffix(GROUPED))
        curve["bandwidth"] = target.figure("memory.bandwidth_bytes_per_second")
        if power != 1.0:
            own = target.name, rate.removesuffix(GROUPED)
            share, source = SUSTAINED.get(own, (power * curve["efficiency"], ""))
            curve["sustained"], model["sustained_source"] = share, source or f"{power:.3f} of a short run, as for bf16"
    for model in result["attention"].values():
        model["derived"] = _joined(model, reason)
        if "like" in model:
            continue
        curve = model["curve"]
        curve["bandwidth"] = target.figure("memory.bandwidth_bytes_per_second")
        curve["peak"] = target.peak("bf16")
        curve["limits"] = {key: [limit * attention, *rest] for key, (limit, *rest) in curve["limits"].items()}
    if "attention_slowdown" in document["constants"]:
        add_slower_attention(result)
    links = f"the {of}'s, of the same links"
    result["links"] = carry(document["links"], {}, links)
    result["held_out"] = {
        label: {**error, "note": links if label.startswith("links") else f"of the {of}; {reason}"}
        for label, error in result["held_out"].items()
    }
    return result


def h100_96(directory: Path) -> Document:
    """H100 with 96 GB HBM2e at 500 W, for which only the rates of large kernels are known."""
    target = device("h100_sxm96")
    share, source = shares("h100_sxm")
    moved = movement(target, share, source, "the shares of the datasheet's bandwidth that the H100 SXM reaches")
    whole = h100(directory)
    constants = {name: value for name, value in whole["constants"].items() if name != "attention_slowdown"}
    known = from_document({**whole, "constants": constants})  # the measurements are of attention alone
    works = [_meta_attention(sequence) for sequence in META_FLASH2]
    rates = [work.flops / seconds_of(work, known)[0] / 1e12 for work in works]
    slower = statistics.median(measured / rate for measured, rate in zip(META_FLASH2.values(), rates, strict=True))
    reason = (
        f"the H100 SXM's in short runs; what holds under 500 W is measured: of products 0.6 of the peak ({TORCHAO}), "
        f"of attention alone {slower:.3f} of the H100 SXM's rate ({TRITON_ON_META})"
    )
    return {**rescaled(whole, target, attention=slower, moved=moved, reason=reason), "sources": [*H100_96_SOURCES, OWN]}


def _meta_attention(sequence: int) -> Attention:
    """Measurements on Meta's H100."""
    return Attention(
        batch=128, heads=8, key_heads=8, queries=sequence, keys=sequence, head_dim=128, value_dim=128, causal=False,
        backward=False, rate="bf16", implementation="flash2", bytes=8 * 128 * 8 * sequence * 128,
    )  # fmt: skip


def h200(directory: Path) -> Document:
    """H200: the processor of the H100, with its own measured memory and links."""
    target = device("h200")
    share, source = shares("h200")
    reason = "the H100 SXM's, of the same processor"
    document = rescaled(h100(directory), target, attention=1.0, moved=movement(target, share, source), reason=reason)
    add_links(document, directory, "h200")
    return document


def a100(directory: Path) -> Document:
    """A100 SXM 80 GB: products measured on the PCIe card, scaled by the known products of the SXM card."""
    target = device("a100_sxm80")
    share, source = shares("a100_sxm80")
    document = frame(target, products={}, movement=movement(target, share, source), sources=[*A100_SOURCES, OWN])
    add_links(document, directory, "a100_sxm80")
    add_products(document, target, "bf16", without_gap(simumax_products(directory, "A100-PCIe-80GB")))
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
    note = f"of both directions together, the forward {ratio:.2f} times as fast as the backward on the A100 PCIe"
    for direction in ("forward", "backward"):
        add_attention(document, target, f"flash2 {direction}", of_direction(pairs, direction, ratio), note)
    add_efficient(document, target, efficient_rows(directory, "A100-80GB-SXM4"), ratio, "")
    same_rate(document, "bf16", "fp16", "the rate of bf16, which the tensor cores share")
    plain_rates(document, target)
    return document


def a100_40(directory: Path) -> Document:
    """A100 SXM 40 GB: the processor and the links of the card of 80 GB, with the memory before its HBM2e."""
    target = device("a100_sxm40")
    share, source = shares("a100_sxm80")
    of = "A100 SXM of 80 GB"
    moved = movement(target, share, source, f"the shares of the datasheet's bandwidth that the {of} reaches")
    reason = f"the {of}'s, of the same processor"
    return rescaled(a100(directory), target, attention=1.0, moved=moved, reason=reason, of=of)


def b200(directory: Path) -> Document:
    """B200."""
    target = device("b200")
    share, source = shares("h200")
    derived = "the shares of the datasheet's bandwidth that the H200 reaches"
    document = frame(
        target, products={}, movement=movement(target, share, source, derived), sources=[*B200_SOURCES, OWN]
    )
    add_links(document, directory, "b200")
    rows = xla_products(directory, "sm_100_B200")
    of_training = simumax_products(directory, "B200")
    add_products(document, target, "bf16", rows["bf16"] + of_training)
    document["products"][f"bf16{GROUPED}"] = of_b200(document["products"]["bf16"]["curve"], of_training)
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
    "a100_sxm40": a100_40,
    "a100_sxm80": a100,
    "h200": h200,
    "b200": b200,
}

if __name__ == "__main__":
    main()
