"""Node times that a run has measured; predicted times until then."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import fx
from torch.fx.node import map_arg

from legoai.lowering.graph.step.step_graph import StepGraph
from legoai.lowering.profile import Profile, ProfileKey, Transfer, UnusableProfileError, saved_profile
from legoai.runtime.process_group import on_first_rank
from legoai.runtime.torch_internals.operators import OpOverload

_ON_SIMULATED: Final[list[str]] = []
"""Types of simulated devices, the innermost last."""


class PredictedTimes(Protocol):
    """Milliseconds of nodes, predicted from shapes alone."""

    def __call__(self, node: fx.Node, bytes: int | None = None) -> float | None:
        """Return the milliseconds of a node, of a collective also for a given buffer size; None without a kernel."""

    def transfer(self, node: fx.Node) -> tuple[str, int] | None:
        """Return the kind and ranks of a collective, and the bytes of its buffer; None of other nodes."""


@contextlib.contextmanager
def on_simulated(device: str) -> Iterator[None]:
    """While entered, measure nothing, and use the profiles of runs on a type of device."""
    _ON_SIMULATED.append(device)
    try:
        yield
    finally:
        _ON_SIMULATED.pop()


class MeasuredProfile:
    """Milliseconds of nodes as the first steps of a run measured them; predicted ones before.

    Args:
        predicted: times until then, and for nodes that were not measured.
        traced: digest of the parts of the plan that are traced, in the key of the profile.
        moments: values per element of a parameter that the optimizer keeps on the device.

    Attributes:
        profile: the measurements; None before there are any.
        moments: as given.
    """

    def __init__(self, predicted: PredictedTimes, *, traced: str, moments: int = 0) -> None:
        self.predicted = predicted
        self.traced = traced
        self.moments = moments
        self.profile: Profile | None = None

    def __call__(self, node: fx.Node, bytes: int | None = None) -> float | None:
        """Return the milliseconds of a node; see :class:`PredictedTimes`."""
        predicted = self.predicted(node, bytes)
        if predicted is None or self.profile is None:
            return predicted
        transfer = self.predicted.transfer(node)
        if transfer is not None:
            kind, size = transfer
            known = self.profile.collectives.get(kind)
            return predicted if known is None else predicted * ratio_at(known, size if bytes is None else bytes)
        times = self.profile.operators.get(signature(node))
        return predicted * self._ratio if times is None else times.measured

    def set(self, profile: Profile) -> None:
        """Use measurements."""
        self.profile = profile
        vars(self).pop("_ratio", None)

    def key(self, graph: StepGraph) -> ProfileKey:
        """Return the cache key of a graph's profile."""
        device = _ON_SIMULATED[-1] if _ON_SIMULATED else device_of(graph).type
        return ProfileKey.of(self.traced, ranks=dist.get_world_size(), device=device)

    def read(self, graph: StepGraph) -> str:
        """Load the cached profile, if there is one, the same on all ranks; return the reason if it cannot be used."""
        key = self.key(graph)
        if _ON_SIMULATED:
            found, problem = _kept(key)
        else:
            found, problem = on_first_rank(lambda: fitting(key, graph))
        if found is not None:
            self.set(found)
        return problem

    @functools.cached_property
    def _ratio(self) -> float:
        """Ratio of an operator's measured to its predicted time."""
        assert self.profile is not None, "something was measured"
        ratios = [times.measured / times.predicted for times in self.profile.operators.values() if times.predicted]
        return median(ratios) if ratios else 1.0


def measures() -> bool:
    """Whether this process runs on a device that can be measured."""
    return not _ON_SIMULATED


def device_of(graph: StepGraph) -> torch.device:
    """Return the device on which a graph computes."""
    device: torch.device = next(iter(graph.inputs().values())).meta["val"].device
    return device


def hardware_of(device: torch.device) -> str:
    """Return the name of a device, with the number of threads for a CPU, on which its times depend."""
    if device.type == "cpu":
        import platform

        return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return str(torch.get_device_module(device.type).get_device_name(device))


def digest_of(graph: StepGraph) -> str:
    """Return the digest of a graph's operators and shapes, in order."""
    digest = hashlib.sha256()
    for node in graph.graph.nodes:
        digest.update(f"{node.name} {signature(node)}\n".encode())
    return digest.hexdigest()


def ratio_at(known: tuple[Transfer, ...], size: int) -> float:
    """Return the ratio of a collective's measured to its predicted time, interpolated between the nearest sizes."""
    ratios = [(item.bytes, item.measured / item.predicted if item.predicted else 1.0) for item in known]
    if size <= ratios[0][0]:
        return ratios[0][1]
    for (small, first), (large, second) in pairwise(ratios):
        if size <= large:
            share = math.log(size / small) / math.log(large / small)
            return first + share * (second - first)
    return ratios[-1][1]


def signature(node: fx.Node) -> str:
    """Return the key of a node's time: its operator, and the shapes and dtypes of its inputs."""
    given = map_arg((node.args, node.kwargs), lambda source: _Value(_shape(source.meta.get("val"))))
    return f"{node.target if isinstance(node.target, str | OpOverload) else _name(node)}{_plain(given)}"


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.op))


class _Value(str):
    """The shape of a node's input."""


def _plain(value: Any) -> str:
    """Return arguments without groups and devices, whose names differ from rank to rank."""
    if isinstance(value, list | tuple):
        return f"({','.join(map(_plain, value))})"
    if isinstance(value, dict):
        return f"({','.join(f'{name}={_plain(item)}' for name, item in value.items())})"
    if isinstance(value, str | torch.device) and not isinstance(value, _Value):
        return ""
    return str(value)


def _shape(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"({','.join(map(_shape, value))})"
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    known = all(isinstance(size, int) for size in value.shape)
    strides = "" if not known or value.is_contiguous() else f"/{list(value.stride())}"
    return f"{str(value.dtype).removeprefix('torch.')}[{','.join(map(str, value.shape))}]{strides}"


def _kept(key: ProfileKey) -> tuple[Profile | None, str]:
    try:
        return saved_profile(key), ""
    except UnusableProfileError as error:
        return None, str(error)


def fitting(key: ProfileKey, graph: StepGraph) -> tuple[Profile | None, str]:
    """Return the cached profile of a graph on this device, or the reason why it cannot be used."""
    found, problem = _kept(key)
    if found is None:
        return None, problem
    hardware = hardware_of(device_of(graph))
    if found.hardware != hardware:
        return None, f"{key.path()} is stale: it was measured on {found.hardware}, and this is {hardware}"
    if found.graph != digest_of(graph):
        return None, f"{key.path()} is stale: the traced graph of the step has changed"
    return found, ""
