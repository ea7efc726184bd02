"""Measured profile of a step's graph: times of operators and collectives, and temporary memory of nodes.

Profiles are stored as JSON, behind a line with its digest, in the user's cache under a hash of the plan's parts that
are traced, ranks, torch, LegoAI and type of device. A run whose plan has a profile uses it from its first step, and so
does the simulator; one whose graph or device is another measures again. Each figure is stored beside the predicted one.
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
from legoai.dsl.analysis.communication.measured_profile import digest_of_traced
from legoai.specs.cache import private_cache, with_digest, without_digest
from legoai.specs.files import replace_file
from legoai.specs.plan import Plan

FOLDER: Final = "graph_profiles"
_FORMAT: Final = 1


class Times(NamedTuple):
    """Measured and predicted milliseconds."""

    measured: float
    predicted: float


class Transfer(NamedTuple):
    """A collective's bytes, and its measured and predicted milliseconds."""

    bytes: int
    measured: float
    predicted: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """Identity of a profile.

    Attributes:
        traced: digest of the parts of the plan that are traced; see
            :func:`legoai.dsl.analysis.communication.measured_profile.digest_of_traced`.
        ranks: of the run.
        device: type of device, as torch names it.
        torch: version.
        legoai: version.
    """

    traced: str
    ranks: int
    device: str
    torch: str
    legoai: str

    @classmethod
    def of(cls, traced: str, *, ranks: int, device: str) -> ProfileKey:
        """Return the key with the versions that are installed."""
        return cls(
            traced=traced,
            ranks=ranks,
            device=device,
            torch=importlib.metadata.version("torch"),
            legoai=legoai.__version__,
        )

    @classmethod
    def of_plan(cls, plan: Plan, *, device: str) -> ProfileKey:
        """Return the key of a plan's profile."""
        return cls.of(digest_of_traced(plan), ranks=plan.mesh.world_size, device=device)

    @property
    def digest(self) -> str:
        """Name of the file."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def path(self) -> Path | None:
        """Return the path of the file; None where there is no cache."""
        folder = private_cache(FOLDER)
        return None if folder is None else folder / f"{self.digest}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measurements of a step's graph; equal on all ranks.

    Attributes:
        hardware: name of the device.
        graph: digest of the graph as it was traced.
        operators: times by signature; see :func:`legoai.lowering.graph.measurement.profile.signature`.
        collectives: by kind and ranks, in the order of their bytes.
        memory: bytes by node, beyond those of the values that live while it runs; negative where it needs fewer.
    """

    hardware: str
    graph: str
    operators: Mapping[str, Times]
    collectives: Mapping[str, tuple[Transfer, ...]]
    memory: Mapping[str, int]


class UnusableProfileError(ValueError):
    """A profile's file is damaged, or belongs to another key."""


def saved_profile(key: ProfileKey) -> Profile | None:
    """Return the profile of a key; None where there is none.

    Raises:
        UnusableProfileError: the file is damaged, or belongs to another key.
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
    if held.startswith(b"{"):
        return None  # by a version that wrote no digests
    content = without_digest(held)
    if content is None:
        raise UnusableProfileError(f"{path} is damaged")
    try:
        body = json.loads(content)
        of = body["of"]
        found = _read(body) if of == {"format": _FORMAT, **asdict(key)} else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnusableProfileError(f"{path} is damaged") from error
    if found is None:
        raise UnusableProfileError(f"{path} is stale: it is of another key")
    return found


def keep_profile(key: ProfileKey, profile: Profile) -> Path | None:
    """Write a profile under its key, atomically; return its path, or None where there is no cache."""
    path = key.path()
    if path is None:
        return None
    body = {"of": {"format": _FORMAT, **asdict(key)}, **asdict(profile)}
    try:
        replace_file(path, with_digest(f"{json.dumps(body, indent=1, sort_keys=True)}\n".encode()))
    except OSError:
        return None
    return path


def digest_of(key: ProfileKey) -> str:
    """Return the digest of a profile's figures; empty where there is no usable one."""
    try:
        found = saved_profile(key)
    except UnusableProfileError:
        return ""
    return "" if found is None else hashlib.sha256(json.dumps(asdict(found), sort_keys=True).encode()).hexdigest()


def _read(body: Mapping[str, Any]) -> Profile:
    """Return the profile that a file holds.

    Raises:
        ValueError: the file is not a profile.
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
