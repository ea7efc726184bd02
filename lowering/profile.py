"""Measured profile of a step's graph: times of its operators and collectives, and memory beyond that of its values.

Kept in the user's cache under a hash of plan, ranks, torch, LegoAI and type of device, as JSON: a run whose plan has
one uses it from its first step, and so does the simulator. Each figure stands beside the one that was predicted.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import legoai
from legoai.dsl.frontend.sources import replace_file
from legoai.specs.cache import private_cache

FOLDER: Final = "graph_profiles"
_FORMAT: Final = 1


class Times(NamedTuple):
    """Milliseconds as they were measured and as they were predicted."""

    measured: float
    predicted: float


class Transfer(NamedTuple):
    """A collective's buffer, and its milliseconds as they were measured and as they were predicted."""

    bytes: int
    measured: float
    predicted: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """What a profile is of.

    Attributes:
        plan: hash of the plan, of which its mesh is a part.
        ranks: of the run.
        device: type of device, as torch names it.
        torch: version.
        legoai: version.
    """

    plan: str
    ranks: int
    device: str
    torch: str
    legoai: str

    @classmethod
    def of(cls, plan: str, *, ranks: int, device: str) -> ProfileKey:
        """Return the key of a plan with the versions that are installed."""
        return cls(
            plan=plan,
            ranks=ranks,
            device=device,
            torch=importlib.metadata.version("torch"),
            legoai=legoai.__version__,
        )

    @property
    def digest(self) -> str:
        """Name of the file."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def path(self) -> Path | None:
        """Return the place of the file; None where there is no cache."""
        folder = private_cache(FOLDER)
        return None if folder is None else folder / f"{self.digest}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What was measured of a step's graph; equal on all ranks.

    Attributes:
        hardware: name of the device.
        graph: digest of the graph as it was traced.
        operators: times by signature; see :func:`legoai.lowering.graph.measured_profile.signature`.
        collectives: by kind and ranks, in the order of their bytes.
        memory: bytes by node, beyond those of the values that live while it runs; fewer are negative.
    """

    hardware: str
    graph: str
    operators: Mapping[str, Times]
    collectives: Mapping[str, tuple[Transfer, ...]]
    memory: Mapping[str, int]


class UnusableProfileError(ValueError):
    """A file of a profile that is damaged, or of something else."""


def kept_profile(key: ProfileKey) -> Profile | None:
    """Return the profile of a key; None where there is none.

    Raises:
        UnusableProfileError: the file is damaged, or of something else.
    """
    path = key.path()
    if path is None:
        return None
    try:
        held = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnusableProfileError(f"{path} cannot be read: {error.strerror}") from error
    try:
        body = json.loads(held)
        of = body["of"]
        found = _read(body) if of == {"format": _FORMAT, **asdict(key)} else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnusableProfileError(f"{path} is damaged") from error
    if found is None:
        raise UnusableProfileError(f"{path} is stale: it is of another plan, version or device")
    return found


def keep_profile(key: ProfileKey, profile: Profile) -> Path | None:
    """Write a profile under its key, whole or not at all; return its place, or None where there is none."""
    path = key.path()
    if path is None:
        return None
    body = {"of": {"format": _FORMAT, **asdict(key)}, **asdict(profile)}
    try:
        replace_file(path, json.dumps(body, indent=1, sort_keys=True) + "\n")
    except OSError:
        return None
    return path


def digest_of(key: ProfileKey) -> str:
    """Return the digest of a profile's figures; empty where there is none that can be used."""
    try:
        found = kept_profile(key)
    except UnusableProfileError:
        return ""
    return "" if found is None else hashlib.sha256(json.dumps(asdict(found), sort_keys=True).encode()).hexdigest()


def _read(body: Mapping[str, Any]) -> Profile:
    """Return the profile that a file holds.

    Raises:
        ValueError: it holds something else.
    """
    operators = {name: Times(*map(_milliseconds, figures)) for name, figures in body["operators"].items()}
    collectives = {
        name: tuple(Transfer(_count(size), *map(_milliseconds, figures)) for size, *figures in transfers)
        for name, transfers in body["collectives"].items()
    }
    memory = {name: _count(size) for name, size in body["memory"].items()}
    hardware, graph = body["hardware"], body["graph"]
    if not isinstance(hardware, str) or not isinstance(graph, str) or not all(collectives.values()):
        raise ValueError("no profile")
    return Profile(hardware=hardware, graph=graph, operators=operators, collectives=collectives, memory=memory)


def _milliseconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError("no time")
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("no number of bytes")
    return value
