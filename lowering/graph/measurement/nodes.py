"""Measurement of a step's graph: the time of each node and its memory, agreed between all ranks.

Each collective is waited for where it is issued, so that its time is measured alone. The first ranks to arrive wait for
the others, so the minimum over ranks is used; for computation, the maximum.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import fx

from legoai.lowering.graph.passes.memory import bytes_of, roots_in
from legoai.lowering.graph.step.operators import WAIT
from legoai.runtime.recomputation.policies import is_collective
from legoai.runtime.torch_internals.operators import OpOverload

_CPU: Final = "cpu"


class Sample(NamedTuple):
    """One execution of a node.

    Attributes:
        name: of the node.
        begin: of its computation.
        end: of its computation.
        bytes: the most that the device held before or after it; on a CPU, the bytes of living values.
    """

    name: str
    begin: Any
    end: Any
    bytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a node in all measured steps, on all ranks.

    Attributes:
        milliseconds: the median.
        bytes: the most that the device held.
    """

    milliseconds: float
    bytes: int


class NodeWatch:
    """Measures nodes while they run.

    Args:
        device: on which they run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type == _CPU else torch.get_device_module(device.type)
        self._samples: list[Sample] = []
        self._collectives: set[str] = set()
        self._roots: dict[fx.Graph, dict[fx.Node, fx.Node]] = {}

    def __call__(self, node: fx.Node, run: Callable[[], Any], values: Mapping[fx.Node, Any]) -> Any:
        """Run a node, and return its result."""
        before = 0 if self._module is None else self._module.memory_allocated()
        begin = self._now()
        result = run()
        if isinstance(node.target, OpOverload) and is_collective(node.target):
            self._collectives.add(node.name)
            for tensor in _tensors(result):
                WAIT(tensor)
        end = self._now()
        held = self._live_bytes(node, values, result) if self._module is None else self._module.memory_allocated()
        self._samples.append(Sample(node.name, begin, end, max(before, held)))
        return result

    def agreed(self) -> dict[str, Measured] | None:
        """Return the measurements of each node, by name, agreed by all ranks; None where ranks ran different nodes."""
        if self._module is not None:
            self._module.synchronize()
        names = [sample.name for sample in self._samples]
        if not self._same_on_all(names):
            return None
        times = [self._milliseconds(sample) for sample in self._samples]
        signed = [-time if name in self._collectives else time for name, time in zip(names, times, strict=True)]
        held = [float(sample.bytes) for sample in self._samples]
        most = torch.tensor([signed, held], dtype=torch.float64, device=self._device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        of_node: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        for name, milliseconds, size in zip(names, *most.tolist(), strict=True):
            of_node[name].append((abs(milliseconds), int(size)))
        return {
            name: Measured(median(milliseconds for milliseconds, _ in found), max(size for _, size in found))
            for name, found in of_node.items()
        }

    def _same_on_all(self, names: list[str]) -> bool:
        digest = int.from_bytes(hashlib.sha256("\n".join(names).encode()).digest()[:7], "big")
        both = torch.tensor([digest, -digest], dtype=torch.int64, device=self._device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        largest, least = both.tolist()
        return bool(largest == -least)

    def _live_bytes(self, node: fx.Node, values: Mapping[fx.Node, Any], result: Any) -> int:
        """Return the bytes of all memory behind values and a result, except the graph's inputs."""
        if node.graph not in self._roots:
            self._roots[node.graph] = roots_in(node.graph)
        roots = self._roots[node.graph]
        made = [value for other, value in (*values.items(), (node, result)) if roots[other].op != "placeholder"]
        return sum({tensor.untyped_storage().data_ptr(): bytes_of(tensor) for tensor in _tensors(made)}.values())

    def _now(self) -> Any:
        if self._module is None:
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def _milliseconds(self, sample: Sample) -> float:
        if self._module is None:
            return 1e3 * float(sample.end - sample.begin)
        return float(sample.begin.elapsed_time(sample.end))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
