"""Fit collectives on one host, and between hosts, to published measurements."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from fit_kernels import errors, read
from scipy.optimize import least_squares

from legoai.cost.network.algorithms import wire_bytes
from legoai.cost.network.bandwidth import LinkCurve
from legoai.cost.network.fabric import analytical, read_fabric
from legoai.cost.network.statistics import Regression, Straggler
from legoai.cost.network.topology import Placement
from legoai.cost.trace.records import CollectiveKind
from legoai.specs.cluster import fabric as catalogued
from legoai.specs.cluster import fabric_names

MIB = 2**20
SHAPE = ([-2.5, math.log(1024)], [1.2, math.log(1024 * MIB)])
"""Bounds of the logarithm of a sigmoid's steepness, and of its middle."""
KINDS: dict[str, CollectiveKind] = {
    "all-gather": "all_gather", "all-reduce": "all_reduce", "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all", "collective-permute": "send", "sendrecv": "send",
}  # fmt: skip
AZURE_ALL_REDUCE = {
    # Bus bandwidth in GB/s at 2^20 to 2^33 bytes, 8 devices; all from Azure's AI benchmarking guide.
    "h100_sxm": (43.70, 81.93, 128.73, 172.13, 234.45, 295.53, 361.78, 400.61,
                 423.38, 438.46, 466.35, 472.36, 475.54, 478.87),
    "h200": (52.96, 88.78, 138.44, 181.94, 240.41, 300.91, 368.11, 412.45,
             432.24, 442.72, 467.58, 472.57, 477.41, 479.98),
    "a100_sxm80": (36.22, 53.54, 71.43, 89.99, 109.22, 132.77, 166.63, 174.18,
                   213.87, 221.58, 228.10, 230.22, 230.48, 231.58),
}  # fmt: skip


@dataclass(frozen=True)
class Timing:
    """A measured collective; ``split`` decides whether it is held out."""

    split: str
    kind: CollectiveKind
    on: Placement
    bytes: int
    seconds: float

    @property
    def held(self) -> bool:
        return int(hashlib.sha256(self.split.encode()).hexdigest(), 16) % 5 == 0


def inside(ranks: int) -> Placement:
    return Placement(ranks=ranks, hosts=1, per_host=ranks)


def xla(directory: Path, key: str) -> list[Timing]:
    """XLA's table of one host of 8; permutations between pairs that send both ways count as transfers."""
    rows = []
    for row in read(directory, "xla_collective_perf_table.csv"):
        if row["device"] != key:
            continue
        kind = KINDS[row["collective"]]
        if kind == "send" and not row["permute_pairs"].startswith("0>1;1>0"):
            continue
        ranks = 2 if kind == "send" else int(row["n_ranks_per_group"])
        seconds = float(row["time_us"]) * 1e-6
        rows.append(Timing(row["id"], kind, inside(ranks), int(row["message_bytes"]), seconds))
    return rows


def published(directory: Path, gpu: str, link: str) -> list[Timing]:
    """Rows of nccl-tests on one host, by prefixes of the device's and the link's name."""
    rows = []
    for row in read(directory, "collectives_nccl_published.csv"):
        seconds = seconds_of_row(row)
        if row["gpu"].startswith(gpu) and row["interconnect"].startswith(link) and row["n_nodes"] == "1" and seconds:
            if "disabled" in row["algo"] or row["algo"] == "Ring" or "Playbook" in row["source"]:
                continue
            kind: CollectiveKind = KINDS.get(row["collective"], row["collective"])
            ranks = 2 if kind == "send" else int(row["n_gpus"])
            rows.append(Timing(row["id"], kind, inside(ranks), int(row["message_bytes"]), seconds))
    return rows


def seconds_of_row(row: dict[str, str]) -> float:
    """Seconds, measured or from the bus bandwidth by nccl-tests' factors; 0 where neither is known."""
    if row["time_us"]:
        return float(row["time_us"]) * 1e-6
    if not (row["busbw_gbs"] and row["message_bytes"] and row["n_gpus"]):
        return 0.0
    ranks = int(row["n_gpus"])
    factor = (2 if row["collective"] == "all_reduce" else 1) * (ranks - 1) / ranks
    return factor * int(row["message_bytes"]) / (float(row["busbw_gbs"]) * 1e9)


def azure(name: str) -> list[Timing]:
    return [
        Timing(f"azure-{name}-{size}", "all_reduce", inside(8), size, 1.75 * size / (rate * 1e9))
        for power, rate in enumerate(AZURE_ALL_REDUCE[name], start=20)
        for size in [2**power]
    ]


def vtrain(directory: Path) -> list[Timing]:
    rows = read(directory, "collectives_vtrain_allreduce_lut.csv")
    return [
        Timing(r["id"], "all_reduce", inside(int(r["n_gpus"])), int(r["message_bytes"]), float(r["time_us"]) * 1e-6)
        for r in rows
        if r["gpu"] == "A100"
    ]


def fit_link(rows: Sequence[Timing]) -> dict[str, Any]:
    """Latency and log-sigmoid of one collective and number of ranks, and the medians at measured sizes."""
    kind, ranks = rows[0].kind, rows[0].on.ranks
    best = max(wire_bytes(kind, row.bytes, ranks) / row.seconds for row in rows)
    least = min(row.seconds for row in rows)

    def seconds(values: Sequence[float], size: float) -> float:
        limit, steepness, middle, latency = values
        rate = math.exp(limit) / (1 + math.exp(-math.exp(steepness) * (math.log(size + 1) - middle)))
        return math.exp(latency) + wire_bytes(kind, size, ranks) / rate

    def residuals(values: Sequence[float]) -> list[float]:
        found = [math.log(row.seconds / seconds(values, row.bytes)) for row in rows]
        weighted = [error * (1 if row.bytes >= MIB else 0.3) for error, row in zip(found, rows, strict=True)]
        return [
            *weighted,
            0.05 * (values[1] + 0.5),
            0.02 * (values[2] - math.log(16 * MIB)),
            0.05 * (values[3] - math.log(least)),
        ]

    start = [math.log(best * 1.05), -0.5, math.log(16 * MIB), math.log(least)]
    low = [math.log(best * 0.7), *SHAPE[0], math.log(least / 4)]
    high = [math.log(best * 1.6), *SHAPE[1], math.log(least * 3)]
    values = least_squares(residuals, start, loss="soft_l1", f_scale=0.05, bounds=(low, high)).x
    return {
        "sigmoid": [math.exp(values[0]), math.exp(values[1]), float(values[2])],
        "latency": math.exp(values[3]),
        "points": medians(rows),
    }


def medians(rows: Sequence[Timing]) -> list[list[float]]:
    by_size: dict[int, list[float]] = {}
    for row in rows:
        by_size.setdefault(row.bytes, []).append(row.seconds)
    points = [(size, statistics.median(times)) for size, times in sorted(by_size.items())]
    return [[size, round(seconds, 9)] for size, seconds in increasing(points)]


def increasing(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Times made non-decreasing in size: none is longer than the least time of larger messages.

    A time that decreases with size is noise, from first calls at the smallest sizes of a sweep, or from other jobs.
    """
    least = math.inf
    result: list[tuple[int, float]] = []
    for size, seconds in reversed(points):
        least = min(least, seconds)
        result.append((size, least))
    return result[::-1]


def link_rows(directory: Path, name: str) -> list[Timing]:
    """All measurements of one device's links."""
    match name:
        case "h100_sxm":
            rows = [row for row in xla(directory, "sm_90") if (row.kind, row.on.ranks) != ("all_reduce", 8)]
            return [*rows, *published(directory, "H100-80GB SXM", "NVLink4/"), *azure(name)]
        case "b200":
            rows = [row for row in xla(directory, "sm_100_B200") if (row.kind, row.on.ranks) != ("all_reduce", 8)]
            return [*rows, *(r for r in published(directory, "B200", "NVLink5") if r.on.ranks == 8)]
        case "h200":
            return [*(r for r in published(directory, "H200", "NV") if r.on.ranks == 8), *azure(name)]
        case _:
            return [*vtrain(directory), *published(directory, "A100-SXM4", "NVLink3"), *azure(name)]


def build_links(rows: Sequence[Timing]) -> dict[str, dict[str, Any]]:
    groups: dict[tuple[str, int], list[Timing]] = {}
    for row in rows:
        groups.setdefault((row.kind, row.on.ranks), []).append(row)
    links: dict[str, dict[str, Any]] = {}
    for (kind, ranks), members in sorted(groups.items()):
        if len({row.bytes for row in members}) >= 5:
            links.setdefault(kind, {})[str(ranks)] = fit_link(members)
    return links


def fit_links(directory: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Collectives on one host, and their errors from 1 MiB upward on held-out measurements."""
    rows = link_rows(directory, name)
    trial = build_links([row for row in rows if not row.held])
    held: dict[str, dict[str, Any]] = {}
    for kind in sorted({row.kind for row in rows}):
        tests = [
            r for r in rows if r.held and r.kind == kind and r.bytes >= MIB and str(r.on.ranks) in trial.get(kind, {})
        ]
        if tests:
            answers = [link_seconds(trial, row) for row in tests]
            held[f"links {kind} from 1 MiB"] = errors([row.seconds for row in tests], answers)
    links = build_links(rows)
    if name == "h200":
        links = carry(fit_links(directory, "h100_sxm")[0], links, "the H100's, of the same links")
    if name == "a100_sxm80":
        halves = {kind: halved(links["all_reduce"]) for kind in ("all_gather", "reduce_scatter")}
        links = {**links, **halves}
        links["send"] = links["all_to_all"] = {"2": transfer(directory)}
    return links, held


def link_seconds(links: dict[str, Any], row: Timing) -> float:
    curve = LinkCurve.read(links[row.kind][str(row.on.ranks)])

    def formula(size: float) -> float:
        return curve.latency + wire_bytes(row.kind, size, row.on.ranks) / curve.sigmoid.at(size)

    exact = curve.measured.at(row.bytes, formula) if curve.measured is not None else None
    return formula(row.bytes) if exact is None else exact


def carry(known: dict[str, Any], own: dict[str, Any], reason: str) -> dict[str, Any]:
    """Another device's collectives, replaced by this device's where these were measured."""
    links = {k: {n: {**curve, "derived": reason} for n, curve in curves.items()} for k, curves in known.items()}
    for kind, curves in own.items():
        links.setdefault(kind, {}).update(curves)
    return links


def halved(curves: dict[str, Any]) -> dict[str, Any]:
    """A ring's all-gather or reduce-scatter, which is one of the two passes of its all-reduce."""
    reason = "half of the all-reduce, whose ring it is one of two passes of"
    return {
        ranks: {
            **curve,
            "latency": curve["latency"] / 2,
            "points": [[size, seconds / 2] for size, seconds in curve["points"]],
            "derived": reason,
        }
        for ranks, curve in curves.items()
    }


def transfer(directory: Path) -> dict[str, Any]:
    """Transfers of the A100 from three measured sizes; the curve has the shape of the all-reduce of two ranks."""
    rows = [row for row in published(directory, "A100", "NVLink3") if row.kind == "send"]
    base = fit_link([row for row in vtrain(directory) if row.on.ranks == 2])
    best = max(row.bytes / row.seconds for row in rows)
    limit, steepness, middle = base["sigmoid"]
    del limit
    reason = "the best rate of three transfers, with the shape of the all-reduce of two"
    return {"sigmoid": [best, steepness, middle], "latency": base["latency"], "points": [], "derived": reason}


# What the catalogue's fabrics were measured at: gpu, interconnect, and how many ranks a host has.
SOURCES = {
    "tcpxo_a3_mega": ("GPUDirect-TCPXO", "h100_sxm"),
    "efa_p6_b200": ("p6-b200", "b200"),
    "efa_p5": ("NVLink4 + AWS EFA", "h100_sxm"),
    "infiniband_ndr": ("NDR IB", "h100_sxm"),
}


def fabric_rows(directory: Path, name: str) -> list[Timing]:
    """nccl-tests over several hosts of 8."""
    rows = []
    for row in read(directory, "collectives_nccl_published.csv"):
        seconds = seconds_of_row(row)
        if SOURCES[name][0] not in row["interconnect"] or not seconds or not row["n_gpus"] or row["n_nodes"] == "1":
            continue
        hosts, ranks = int(row["n_nodes"]), int(row["n_gpus"])
        on = Placement(ranks=ranks, hosts=hosts, per_host=ranks // hosts)
        rows.append(Timing(row["id"], row["collective"], on, int(row["message_bytes"]), seconds))
    return rows


def alps(directory: Path) -> tuple[list[Timing], list[tuple[int, float, float]], list[Timing]]:
    """Least time of each number of ranks and size, the spread over runs, and the runs on one host.

    Runs differ in the network library's settings and in their day: their spread is an estimate of that between jobs.
    """
    groups: dict[tuple[int, int], list[float]] = {}
    for row in read(directory, "collectives_alps_gh200.csv"):
        groups.setdefault((int(row["n_gpus"]), int(row["message_bytes"])), []).append(float(row["time_us"]) * 1e-6)
    rows, spread, single = [], [], []
    for (ranks, size), times in sorted(groups.items()):
        on = Placement(ranks=ranks, hosts=max(1, ranks // 4), per_host=4)
        timing = Timing(f"alps-{ranks}-{size}", "all_reduce", on, size, min(times))
        (single if on.hosts == 1 else rows).append(timing)
        if on.hosts > 1 and len(times) >= 4 and size >= 1024:
            spread.append((ranks, float(size), float(np.quantile(times, 0.75)) / min(times)))
    return rows, spread, single


Document = dict[str, Any]


def fit_formula(rows: Sequence[Timing], bandwidth: float, links: dict[str, Any]) -> Document:
    """Share, base and hop that minimise the logarithmic error of the analytical time.

    Latency is unknown where neither small messages nor several numbers of hosts were measured: base is then that of the
    collective on one host, and hop the catalogue's constant for a hop of InfiniBand.
    """
    small = min(row.bytes for row in rows) <= MIB or len({row.on.hosts for row in rows}) > 2
    least = min(curve["latency"] for curve in links["all_reduce"].values())
    latency = 2.7e-6

    start = [2.5, -0.5, math.log(2 * MIB), math.log(least), math.log(latency)]

    def document(values: Sequence[float]) -> Document:
        return {
            "share": [1 / (1 + math.exp(-values[0])), math.exp(values[1]), float(values[2])],
            "base": math.exp(values[3]),
            "hop": math.exp(values[4]),
        }

    def residuals(values: Sequence[float]) -> list[float]:
        model = read_fabric("trial", document(values))
        found = []
        for row in rows:
            link = link_rate(links, row)
            seconds, _ = analytical(row.kind, row.bytes, row.on, model, bandwidth=bandwidth, link=link)
            found.append(math.log(row.seconds / seconds) * (1 if row.bytes >= MIB else 0.3))
        weights = (0.05, 0.05, 0.05, *((0.05, 0.05) if small else (10.0, 10.0)))
        return [*found, *(w * (value - prior) for w, value, prior in zip(weights, values, start, strict=True))]

    low = [-3.0, *SHAPE[0], math.log(1e-6), math.log(1e-8)]
    # A hop of 100 microseconds is a lot: what costs more as hosts are added is congestion, not latency.
    high = [8.0, *SHAPE[1], math.log(1e-2), math.log(1e-4)]
    best = least_squares(residuals, start, loss="soft_l1", f_scale=0.1, bounds=(low, high))
    return document(best.x)


def link_rate(links: dict[str, Any], row: Timing) -> float:
    curves = links.get(row.kind, links["all_reduce"])
    nearest = min(curves, key=lambda count: abs(math.log(int(count) / row.on.per_host)))
    return 1 / LinkCurve.read(curves[nearest]).sigmoid.at(row.bytes)


def fit_fabric(rows: Sequence[Timing], bandwidth: float, links: dict[str, Any], *, regress: bool) -> Document:
    document = fit_formula(rows, bandwidth, links)
    model = read_fabric("trial", document)
    if regress:
        document["regression"] = {}
        for kind in sorted({row.kind for row in rows}):
            inputs = []
            for row in rows:
                if row.kind == kind and row.bytes >= MIB / 16:
                    link = link_rate(links, row)
                    t, latency = analytical(row.kind, row.bytes, row.on, model, bandwidth=bandwidth, link=link)
                    inputs.append((t, latency, row.on.ranks, float(row.bytes), row.seconds))
            document["regression"][kind] = Regression.fit(inputs).document()
    tables: dict[str, list[Timing]] = {}
    for row in rows:
        tables.setdefault(f"{row.kind} {row.on.hosts} {row.on.per_host}", []).append(row)
    document["measured"] = {key: medians(members) for key, members in sorted(tables.items())}
    return document


def predict(document: Document, row: Timing, bandwidth: float, links: dict[str, Any], *, table: bool) -> float:
    model = read_fabric("trial", document)
    measured = model.measured.get((row.kind, row.on.hosts, row.on.per_host)) if table else None

    def formula(size: float) -> tuple[float, float]:
        link = link_rate(links, replace(row, bytes=round(size)))
        return analytical(row.kind, size, row.on, model, bandwidth=bandwidth, link=link)

    exact = measured.at(row.bytes, lambda size: formula(size)[0]) if measured else None
    if exact is not None:
        return exact
    seconds, latency = formula(row.bytes)
    regression = model.regression.get(row.kind)
    return seconds if regression is None else regression.seconds(seconds, latency, row.on.ranks, row.bytes)


def held_out(rows: Sequence[Timing], bandwidth: float, links: dict[str, Any], *, regress: bool) -> Document:
    """Errors from 1 MiB upward on held-out rows, of a fit without them, with the table and without."""
    trial = fit_fabric([row for row in rows if not row.held], bandwidth, links, regress=regress)
    tests = [row for row in rows if row.held and row.bytes >= MIB]
    if not tests:
        return {"none": {"rows": 0, "note": f"all {len(rows)} measurements are fitted"}}
    measured = [row.seconds for row in tests]
    return {
        "from 1 MiB": errors(measured, [predict(trial, row, bandwidth, links, table=True) for row in tests]),
        "from 1 MiB, formula alone": errors(
            measured, [predict(trial, row, bandwidth, links, table=False) for row in tests]
        ),
    }


def fit_fabrics(directory: Path) -> Document:
    """Fit all fabrics of the catalogue that have a bandwidth."""
    fabrics: Document = {}
    for name, (_, host) in SOURCES.items():
        rows = fabric_rows(directory, name)
        bandwidth = catalogued(name).figure("bandwidth_bytes_per_second")
        links = fit_links(directory, host)[0]
        fabrics[name] = {
            **fit_fabric(rows, bandwidth, links, regress=scales(rows)),
            "held_out": held_out(rows, bandwidth, links, regress=scales(rows)),
        }
    rows, spread, single = alps(directory)
    bandwidth = catalogued("slingshot11").figure("bandwidth_bytes_per_second")
    links = build_links(single)
    fabrics["slingshot11"] = {
        **fit_fabric(rows, bandwidth, links, regress=True),
        "straggler": straggler(spread),
        "held_out": held_out(rows, bandwidth, links, regress=True),
    }
    for name in fabric_names():
        if name not in fabrics and catalogued(name).bandwidth_bytes_per_second is not None:
            fabrics[name] = derived(name, fabrics)
    for name, document in fabrics.items():
        for label, error in document.get("held_out", {}).items():
            print(f"fabric {name:18} {label:28} " + "  ".join(f"{key} {value}" for key, value in error.items()))
    return {"fabrics": fabrics}


def scales(rows: Sequence[Timing]) -> bool:
    """Whether enough numbers of hosts were measured for a regression on them."""
    return len({row.on.hosts for row in rows}) > 3


def straggler(spread: Sequence[tuple[int, float, float]]) -> Document:
    fitted = Straggler.fit(spread)
    return {"intercept": fitted.intercept, "slope": fitted.slope, "ranks": fitted.ranks, "bytes": fitted.bytes}


def derived(name: str, fabrics: Document) -> Document:
    """A fabric that was not measured: the adapter's share, the base and the hop of a similar one."""
    like = "tcpxo_a3_mega" if "ethernet" in name else "efa_p6_b200" if name.startswith("efa") else "infiniband_ndr"
    model = fabrics[like]
    return {
        "share": model["share"],
        "base": model["base"],
        "hop": catalogued(name).latency_seconds or model["hop"],
        "derived": f"the share of the adapter's bandwidth of {like}; the catalogue's latency, where it has one",
    }
