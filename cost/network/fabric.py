"""Networks between hosts: their measured models and the analytical one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from legoai.cost.measurements.interpolation import Measured
from legoai.cost.network.algorithms import traffic
from legoai.cost.network.bandwidth import Sigmoid
from legoai.cost.network.statistics import Regression, Straggler
from legoai.cost.network.topology import Placement
from legoai.cost.trace.records import CollectiveKind
from legoai.specs.profile_file import ProfileError, read_document

FILE: Final = Path(__file__).parent.parent / "profiles" / "fabrics.json.gz"


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricModel:
    """Measured or derived performance of a fabric.

    Attributes:
        name: in the catalogue.
        share: of the adapter's bandwidth, over the bytes through the adapter.
        base: seconds of a collective over hosts, however small.
        hop: seconds of a step from host to host.
        measured: by collective, hosts and ranks on a host.
        regression: by collective.
        straggler: None where no spread was measured.
        derived: derivation, where it was not measured.
        held_out: error on measurements that were not fitted.
        observed: as ``measured``, from runs of the user's own, which take precedence.
    """

    name: str
    share: Sigmoid
    base: float
    hop: float
    measured: Mapping[tuple[str, int, int], Measured]
    regression: Mapping[str, Regression]
    straggler: Straggler | None
    derived: str
    held_out: Mapping[str, Mapping[str, Any]]
    observed: Mapping[tuple[str, int, int], Measured] = field(default_factory=dict)


@cache
def fabric_model(name: str) -> FabricModel:
    """The shipped model of the catalogue's fabric ``name``.

    Raises:
        ProfileError: there is none.
    """
    document, _ = read_document(FILE)
    if name not in document["fabrics"]:
        known = ", ".join(sorted(document["fabrics"]))
        raise ProfileError(f"there is no model of the speed of {name}; there are {known}")
    return read_fabric(name, document["fabrics"][name])


def read_fabric(name: str, document: Mapping[str, Any]) -> FabricModel:
    """The model that a JSON object holds.

    Raises:
        KeyError: a field is missing.
        ValueError: a field makes no sense.
    """
    limit, steepness, middle = document["share"]
    straggler = document.get("straggler")
    return FabricModel(
        name=name,
        share=Sigmoid(limit=limit, steepness=steepness, middle=middle),
        base=float(document["base"]),
        hop=float(document["hop"]),
        measured=read_tables(document.get("measured", {})),
        regression={kind: Regression.read(item) for kind, item in document.get("regression", {}).items()},
        straggler=Straggler.read(straggler) if straggler else None,
        derived=str(document.get("derived", "")),
        held_out=document.get("held_out", {}),
    )


def read_tables(document: Mapping[str, Any]) -> dict[tuple[str, int, int], Measured]:
    """Measured times by collective, hosts and ranks on a host, from keys such as `all_gather 2 8`.

    Raises:
        ValueError: a key or a time makes no sense.
    """
    tables = {}
    for key, points in document.items():
        kind, hosts, per_host = key.split()
        table = Measured.read(points)
        if table is not None:
            tables[kind, int(hosts), int(per_host)] = table
    return tables


def analytical(
    kind: CollectiveKind, size: float, on: Placement, fabric: FabricModel, *, bandwidth: float, link: float
) -> tuple[float, float]:
    """Return the seconds of a collective over hosts, and the latency among them.

    ``bandwidth`` is of one device's adapter and ``link`` the seconds that a byte takes over a device's link. The time
    is ``base + hops · hop + max(bytes over a link · link, bytes over an adapter / B)`` of the best algorithm.
    """
    best = (math.inf, 0.0)
    for sent in traffic(kind, size, on):
        rate = bandwidth * fabric.share.at(sent.adapter_bytes)
        latency = fabric.base + sent.hops * fabric.hop
        best = min(best, (latency + max(sent.link_bytes * link, sent.adapter_bytes / rate), latency))
    return best
