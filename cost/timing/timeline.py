"""Costs of operations, the host that issues them, and the timeline of a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

from legoai.cost.trace.pickling import pickled_by_position
from legoai.cost.trace.records import EACH, UNDER_POLICY, Call, Collective, Copy, HostKernel, Kernel

Resource = Literal["compute", "intra_host", "inter_host", "host_to_device", "device_to_host", "host"]
COMMUNICATION: Final[tuple[Resource, ...]] = ("intra_host", "inter_host")
Timed: TypeAlias = Kernel | HostKernel | Collective | Copy

_LEAST_LEFT: Final = 0.1
"""Lower bound of the share of memory bandwidth left to a kernel beside collectives."""


def call_constant(call: Call) -> str:
    """Return the name of a profile's constant for the host time of a call, in seconds."""
    return f"{call.replace(' ', '_')}_call_seconds"


class Beside(NamedTuple):
    """Time of a kernel beside a collective, divided by its time alone: the sum of two parts.

    Attributes:
        fixed: the same beside every collective that occupies multiprocessors.
        blocks: of independent blocks, multiplied by :attr:`Left.slowdown`.
    """

    fixed: float
    blocks: float = 0.0


@pickled_by_position
@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of one operation when nothing runs beside it.

    Attributes:
        seconds: its time on the device.
        resource: that it occupies.
        model: the model that estimated the time.
        beside: of a kernel, its time while a collective occupies multiprocessors, divided by its time alone; None where
            that is not known for its class, so that :attr:`Host.compute_slowdown` is used.
        memory: the share of the attainable memory bandwidth that it uses while it runs alone.
        slowdown: of a collective, the time of a kernel of independent blocks on the multiprocessors that it leaves,
            divided by that on all of them; None where it runs on copy engines.
    """

    seconds: float
    resource: Resource
    model: str
    beside: Beside | None = None
    memory: float = 0.0
    slowdown: float | None = 1.0


class Left(NamedTuple):
    """Resources that collectives leave to kernels that run beside them.

    Attributes:
        slowdown: as :attr:`Cost.slowdown`, of the collective that leaves fewest multiprocessors; None where none
            occupies any.
        memory: the share of the memory bandwidth that is left.
    """

    slowdown: float | None
    memory: float


def left_by(collectives: Sequence[Cost]) -> Left:
    """Return what some collectives leave."""
    memory = max(_LEAST_LEFT, 1 - sum(item.memory for item in collectives))
    return Left(max((item.slowdown for item in collectives if item.slowdown is not None), default=None), memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Host time of operations, and slowdown of computation by communication.

    Attributes:
        dispatch_seconds: host time of one operation that C++ issues, as autograd nodes do; 0 where the host is never
            the bottleneck, as in a replayed graph.
        python_seconds: of one that Python issues, including Python's time between two operations; None where it is not
            known, so that `dispatch_seconds` is used.
        function_seconds: of one that the backward of a Python autograd function issues; None where it is not known, so
            that `python_seconds` is used.
        recompute_seconds: of one that a checkpoint issues again, including the checkpoint's hooks in forward and
            backward; None where it is not known, so that `python_seconds` is used.
        policy_seconds: of one that a policy of selective checkpointing sees in forward; None where it is not known, so
            that `python_seconds` is used.
        policy_recompute_seconds: of one that it sees where it runs again, including the checkpoint's hooks; None where
            it is not known, so that `recompute_seconds` is used.
        calls: seconds of a call that the host makes beside issuing operations; those of other kinds take none.
        compute_slowdown: the time of a kernel beside a collective divided by its time alone, at least 1, where it is
            not known for the kernel's class.
    """

    dispatch_seconds: float = 0.0
    python_seconds: float | None = None
    function_seconds: float | None = None
    recompute_seconds: float | None = None
    policy_seconds: float | None = None
    policy_recompute_seconds: float | None = None
    calls: Mapping[Call, float] = field(default_factory=dict)
    compute_slowdown: float = 1.0

    def dispatch(self, record: Kernel | Collective | Copy) -> float:
        """Return the seconds until an operation is issued; 0 in a CUDA graph, whose kernels are launched together."""
        if type(record) is Kernel and "replayed" in record.attributes:
            return 0.0
        seconds = self._issue(record)
        for call, number in record.calls:
            if number == EACH:
                number = len(record.inputs) if type(record) is Kernel else 1  # noqa: PLW2901
            seconds += number * self.calls.get(call, 0.0)
        return seconds

    def _issue(self, record: Kernel | Collective | Copy) -> float:
        if record.issuer == "node" or self.python_seconds is None:
            return self.dispatch_seconds
        if type(record) is Kernel and UNDER_POLICY in record.attributes:
            seconds = self.policy_recompute_seconds if record.phase == "recompute" else self.policy_seconds
            if seconds is not None:
                return seconds
        if record.issuer == "function" and self.function_seconds is not None:
            return self.function_seconds
        if record.phase == "recompute" and self.recompute_seconds is not None:
            return self.recompute_seconds
        return self.python_seconds

    def slowdown(self, kernel: Cost, collectives: Sequence[Cost]) -> float:
        """Return the time of a kernel beside collectives, divided by its time alone."""
        return self.factor(kernel, left_by(collectives)) if collectives else 1.0

    def factor(self, kernel: Cost, left: Left) -> float:
        """Return the time of a kernel beside collectives, given what they leave, divided by its time alone.

        They take multiprocessors from it, if they run on any, and bandwidth of the memory, of which it has what they
        leave; what is scarcer counts.
        """
        processors = 1.0
        if left.slowdown is not None:
            beside = kernel.beside
            processors = self.compute_slowdown if beside is None else beside.fixed + beside.blocks * left.slowdown
        return max(1.0, processors, kernel.memory / left.memory)


class Interval(NamedTuple):
    """One operation's time on the device, in seconds from the beginning of the trace."""

    record: Timed
    cost: Cost
    queue: str
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Timeline of a rank.

    Attributes:
        intervals: by start.
        marks: (name, host time) of each mark.
        end: time at which the last operation, and the host, are done.
    """

    intervals: Sequence[Interval]
    marks: tuple[tuple[str, float], ...]
    end: float
