"""Host time of calls beside operations: of DTensor, of Python autograd functions, and of FSDP units.

A chain of equal links is timed, less what the simulator charges for the operations that it issues. Collectives are
those of a process group without other processes, and tensors so small that only the host's work takes time.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from legoai.cost.calibration.host import HostTimer, chain, host_timer, python_seconds
from legoai.cost.simulated.calls import counted_functions
from legoai.cost.simulated.device import Recorder
from legoai.cost.simulated.operators.properties import operator
from legoai.cost.timing.timeline import call_constant
from legoai.cost.trace.garbage import uncollected
from legoai.cost.trace.records import Call, Record
from legoai.runtime.torch_internals.distributed.collectives import AsyncCollectiveTensor
from legoai.runtime.torch_internals.distributed.fake_world import FakeStore, forget_meshes
from legoai.runtime.torch_internals.operators import TorchDispatchMode
from legoai.runtime.wrapped import to_local

_MEASURED: Final[dict[Call, str]] = {
    "function": "forward of a chain of identities",
    "function backward": "backward of a chain of identities",
    "dtensor": "what two tensor parallel linear layers add to a step, for each operator, less all other calls",
    "listed dtensor": "what DTensors add to a fused update, for each tensor of its lists",
    "conversion": "forward of a chain that converts tensors to DTensors and back",
    "conversion backward": "backward of a chain that converts tensors to DTensors and back",
    "functional collective": "a redistribution by a collective, less its conversions and operations",
    "unit": "what an FSDP unit adds to a forward that finds its parameters gathered",
    "gather": "what the gather of its parameters adds to a forward of an FSDP unit",
    "gathered parameter": "what a further parameter adds to a gather of an FSDP unit",
    "reduction": "what an FSDP unit adds to a backward that keeps its parameters",
    "reduced parameter": "what a further parameter adds to a backward of an FSDP unit",
}
_PARTS: Final = 25
"""Parts that are timed one after another."""
_RANKS: Final = 2
_FEATURES: Final = 16
_UNITS: Final = 10
_LISTED: Final = 50
_LISTS: Final = 5
"""Lists of a fused update: parameters, gradients, two moments and steps."""
_FEW, _MANY = 2, 10
"""Parameters of the units that are timed, about as many as a decoder's layer and block have."""


class _Counted(TorchDispatchMode, Recorder):
    """Counts operations that are issued, operators on DTensors, and calls of functions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[Call] = Counter()

    def record(self, record: Record) -> None:
        """Ignore records; nothing is simulated."""

    def call(self, kind: Call, number: int = 1) -> None:
        """Count calls."""
        self.calls[kind] += number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            self.call("dtensor")
            return NotImplemented
        if func.namespace != "profiler":
            treatment = operator(func).treatment
            self.issued += treatment in ("kernel", "copy", "collective")
            if func.namespace == "_c10d_functional" and treatment == "collective":
                self.call("functional collective")
        return func(*args, **(kwargs or {}))


class _Pass(NamedTuple):
    """A pass over a chain: seconds, and what it issues."""

    seconds: float
    counted: _Counted


class _Link(nn.Module):
    """A link that calls a function of a tensor."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the function."""
        return self.function(x)


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _Scales(nn.Module):
    """A unit with some parameters, each of which one kernel uses."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(_FEATURES)) for _ in range(parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale the last dimension."""
        for scale in self.scales:
            x = x * scale
        return x


class _FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(_FEATURES, _FEATURES, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply two linear layers, and an activation between them."""
        found: torch.Tensor = self.down(torch.relu(self.up(x)))
        return found


@contextlib.contextmanager
def _mesh(device: str) -> Iterator[DeviceMesh]:
    """A mesh of one rank of this process and another one that does not exist."""
    forget_meshes()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=_RANKS)
    try:
        yield init_device_mesh(device, (_RANKS,))
    finally:
        dist.destroy_process_group()
        forget_meshes()


@dataclass(frozen=True, slots=True)
class CallTimer:
    """Timer of calls.

    Attributes:
        timer: of the host's work.
        device: of the tensors.
        kernel: seconds of a kernel that Python issues, which the simulator charges besides.
    """

    timer: HostTimer
    device: str
    kernel: float

    def seconds(self) -> dict[Call, float]:
        """Seconds of each kind of call; 0 where a difference between two times is lost in their noise."""
        with _mesh(self.device) as mesh:
            listed: dict[Call, float] = {"listed dtensor": self._listed(mesh)}
            found = {**self._functions(), **self._of_dtensor(mesh), **listed, **self._of_units(mesh)}
        return {call: max(0.0, seconds) for call, seconds in found.items()}

    def _functions(self) -> dict[Call, float]:
        links = chain(lambda: _Link(_Identity.apply))
        forward, backward = self._passes(links, self._input())
        return {"function": forward.seconds / len(links), "function backward": backward.seconds / len(links)}

    def _of_dtensor(self, mesh: DeviceMesh) -> dict[Call, float]:
        conversion, back = self._conversions(mesh)
        collectives = [
            self._collective(mesh, conversion, *ends)
            for ends in ((Partial(), Replicate()), (Shard(1), Replicate()), (Partial(), Shard(1)))
        ]
        found: dict[Call, float] = {
            "conversion": conversion,
            "conversion backward": back,
            "functional collective": statistics.fmean(collectives),
        }
        return {**found, "dtensor": self._operator(mesh, found)}

    def _operator(self, mesh: DeviceMesh, known: Mapping[Call, float]) -> float:
        """Seconds of an operator on DTensors in tensor parallel layers, whose other calls are known."""
        layers = chain(_FeedForward).to(self.device)
        plain = self._passes(layers, self._input())
        for layer in layers:
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        parallel = self._passes(layers, self._input())
        seconds = sum(one.seconds for one in parallel) - sum(one.seconds for one in plain)
        calls = parallel[0].counted.calls + parallel[1].counted.calls
        seconds -= sum(calls[call] * each for call, each in known.items())
        issued = sum(one.counted.issued for one in parallel) - sum(one.counted.issued for one in plain)
        return (seconds - issued * self.kernel) / calls["dtensor"]

    def _conversions(self, mesh: DeviceMesh) -> tuple[float, float]:
        """Seconds of a function of DTensor in forward, and in backward."""
        forward, backward = self._passes(_redistributed(mesh, Replicate(), Replicate()), self._input())
        once = forward.seconds / forward.counted.calls["conversion"]
        inside = once * backward.counted.calls["conversion"]
        return once, (backward.seconds - inside) / backward.counted.calls["conversion backward"]

    def _collective(self, mesh: DeviceMesh, conversion: float, before: Placement, behind: Placement) -> float:
        """Seconds of a collective that redistributes a tensor."""
        links = _redistributed(mesh, before, behind)
        forward, _ = self._passes(links, self._input(), backward=False)
        counted = forward.counted
        other = conversion * counted.calls["conversion"] + self.kernel * counted.issued
        return (forward.seconds - other) / counted.calls["functional collective"]

    def _listed(self, mesh: DeviceMesh) -> float:
        """Seconds of a DTensor in the lists of an optimizer's update."""

        def update(*placements: Placement) -> float:
            """Seconds of an update of plain tensors, or of DTensors."""
            optimizer = torch.optim.AdamW(
                [nn.Parameter(self._placed(mesh, *placements)) for _ in range(_LISTED)], fused=True
            )
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = self._placed(mesh, *placements)
            optimizer.step()
            return self.timer.least(lambda: None, lambda _: optimizer.step())

        return (update(Shard(0)) - update()) / (_LISTED * _LISTS)

    def _placed(self, mesh: DeviceMesh, *placements: Placement) -> torch.Tensor:
        """A tensor of few elements, or the DTensor of which it is the local one."""
        local = torch.ones(_FEATURES, device=self.device)
        return DTensor.from_local(local, mesh, placements, run_check=False) if placements else local

    def _of_units(self, mesh: DeviceMesh) -> dict[Call, float]:
        few, many = (self._unit(mesh, count) for count in (_FEW, _MANY))
        each = [(more - less) / (_MANY - _FEW) for less, more in zip(few[1:], many[1:], strict=True)]
        gather, reduction = (one - _FEW * other for one, other in zip(few[1:], each, strict=True))
        return {
            "unit": statistics.fmean((few[0], many[0])),
            "gather": gather,
            "gathered parameter": each[0],
            "reduction": reduction,
            "reduced parameter": each[1],
        }

    def _unit(self, mesh: DeviceMesh, parameters: int) -> tuple[float, float, float]:
        """Seconds of a unit's forward, of the gather of its parameters, and of the reduction of their gradients."""

        def units(*, sharded: bool, kept: bool) -> nn.Sequential:
            made = chain(lambda: _Scales(parameters), _UNITS).to(self.device)
            for unit in made.children() if sharded else ():
                fully_shard(unit, mesh=mesh, reshard_after_forward=not kept)
            return made

        def passes(model: nn.Module) -> tuple[_Pass, _Pass]:
            return self._passes(model, self._input())

        plain, gathering = passes(units(sharded=False, kept=False)), passes(units(sharded=True, kept=False))
        kept = units(sharded=True, kept=True)
        for unit in kept.children():
            assert isinstance(unit, FSDPModule)
            unit.set_reshard_after_backward(False)
        keeping = passes(kept)

        def more(place: int, with_units: tuple[_Pass, _Pass]) -> float:
            issued = with_units[place].counted.issued - plain[place].counted.issued
            return (with_units[place].seconds - plain[place].seconds - self.kernel * issued) / _UNITS

        hooks = more(0, keeping)
        return hooks, more(0, gathering) - hooks, more(1, keeping)

    def _input(self) -> torch.Tensor:
        return torch.ones(_RANKS, _RANKS * 2, _FEATURES, device=self.device, requires_grad=True)

    def _passes(self, model: nn.Module, x: torch.Tensor, *, backward: bool = True) -> tuple[_Pass, _Pass]:
        """Time a forward and a backward pass of a chain, and count what they issue; 0 seconds for no backward pass."""

        def loss() -> torch.Tensor:
            model.zero_grad()
            return to_local(model(x)).sum()

        def run(total: torch.Tensor) -> None:
            if backward:
                total.backward()  # type: ignore[no-untyped-call]

        run(loss())
        left: list[torch.Tensor] = []
        forward = self.timer.least(lambda: _wait(left), lambda _: left.append(model(x)))
        back = self.timer.least(loss, run) if backward else 0.0
        with _counting() as first:
            left.append(model(x))
        _wait(left)
        total = loss()
        with _counting() as second:
            run(total)
        return _Pass(forward, first), _Pass(back, second)


def call_constants(device: str, seconds: float = math.inf) -> dict[str, dict[str, Any]]:
    """Return a profile's constants for the host time of calls, measured within about some seconds.

    The process must belong to no process group.
    """
    kernel = python_seconds(device)
    with uncollected(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of collectives that torch itself calls
        found = CallTimer(host_timer(device, seconds / _PARTS), device, kernel).seconds()
    return {
        call_constant(call): {"value": each, "source": f"measured here: {_MEASURED[call]}"}
        for call, each in found.items()
    }


def _wait(results: list[torch.Tensor]) -> None:
    """Wait for results and forget them: torch warns at exit of collectives that nothing has waited for."""
    for result in results:
        if isinstance(result, AsyncCollectiveTensor):
            result.trigger_wait()  # type: ignore[no-untyped-call]
    results.clear()


@contextlib.contextmanager
def _counting() -> Iterator[_Counted]:
    counted = _Counted()
    with counted_functions(counted), counted:
        yield counted


def _redistributed(mesh: DeviceMesh, before: Placement, behind: Placement) -> nn.Module:
    """A chain whose links convert a tensor to a DTensor, redistribute it, and convert it back, in the same shape."""

    def link(x: torch.Tensor) -> torch.Tensor:
        given = DTensor.from_local(x, mesh, (before,), run_check=False)
        found = given.redistribute(placements=(behind,)).to_local()
        if isinstance(before, Shard):
            return found[:, : x.shape[1]]
        return torch.cat((found, found), 1) if isinstance(behind, Shard) else found

    links = chain(lambda: _Link(link))
    links.append(_Link(torch.relu))  # waits for the last collective
    return links
