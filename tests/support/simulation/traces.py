"""Traces of a GPU's rank in the format of torch's profiler (torch 2.13, Kineto), written event by event.

The format is that of published traces of A100s: an operator on a thread of the host, in it the call of the runtime that
launches a kernel, and the kernel with the same correlation, on a clock in microseconds.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PID, MAIN, BACKWARD = 2910249, 2910249, 2919752
A100 = {"id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85_100_000_000, "computeMajor": 8, "numSms": 108}


class GpuTrace:
    """A trace that grows by one call after the other."""

    def __init__(
        self,
        rank: int = 0,
        world: int = 2,
        groups: Sequence[tuple[str, Sequence[int]]] | None = None,
        *,
        shapes: bool = True,
    ) -> None:
        self.groups = groups if groups is not None else [("0", range(world))]
        self.rank, self.world, self.shapes = rank, world, shapes
        self.events: list[dict[str, Any]] = []
        self.clock = 4_458_676_388_068.75
        self.number = 0

    def call(
        self, name: str, dims: list[Any], types: list[str], *kernels: float, values: list[str] | None = None,
        tid: int = MAIN, inside: Sequence[str] = (), external_only: bool = False,
    ) -> None:  # fmt: skip
        """A nested operator that launches kernels of the given microseconds in sequence."""
        self.number += 1
        start, length = self.clock, 20.0 + 10.0 * len(kernels)
        for depth, around in enumerate(inside):
            self._host(around, start - len(inside) + depth, length + 2 * (len(inside) - depth), tid, {})
        said = {
            "Record function id": 0, "Concrete Inputs": values or [""] * len(dims), "Input type": types,
            "Input Strides": [_strides(shape) for shape in dims], "Input Dims": dims,
        }  # fmt: skip
        external = self._host(name, start, length, tid, said if self.shapes else {})
        at = start + length
        for index, lasts in enumerate(kernels):
            correlation = 60_000 + 10 * self.number + index
            if not external_only:
                self._event(
                    "cuda_runtime", "cudaLaunchKernel", start + 5 + 10 * index, 4.0, tid, {"correlation": correlation}
                )
            self._kernel("void cutlass::Kernel<...>(...)", at, lasts, correlation, external, {})
            at += lasts + 1
        self.clock = at + 10

    def collective(
        self, name: str, counts: tuple[int, int], lasts: float, *, group: tuple[str, Sequence[int]] = ("0", (0, 1)),
        dtype: str = "Float", beside: bool = False, ranks: str | None = None,
    ) -> None:  # fmt: skip
        """A kernel of NCCL, beside what follows or before it."""
        self.number += 1
        said = {
            "Collective name": name, "In msg nelems": counts[0], "Out msg nelems": counts[1],
            "Group size": len(group[1]), "dtype": dtype, "In split size": "[]", "Out split size": "[]",
            "Process Group Name": group[0],
            "Process Group Description": "default_pg",
            "Process Group Ranks": json.dumps(list(group[1])) if ranks is None else ranks,
        }  # fmt: skip
        external = self._host("record_param_comms", self.clock, 20.0, MAIN, said)
        correlation = 60_000 + 10 * self.number
        self._event("cuda_runtime", "cudaLaunchKernelExC", self.clock + 5, 4.0, MAIN, {"correlation": correlation})
        kernel = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        self._kernel(kernel, self.clock + 30, lasts, correlation, external, said, stream=40)
        self.clock += 31 if beside else 40 + lasts

    def write(self, path: Path) -> Path:
        """Write the trace, compressed where the name ends in `.gz`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = self.text()
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
        return path

    def text(self) -> str:
        """The JSON, its fields in Kineto's order and with its line breaks."""
        groups = [{"pg_name": name, "pg_size": len(ranks), "ranks": list(ranks)} for name, ranks in self.groups]
        head = {
            "schemaVersion": 1, "deviceProperties": [A100], "record_shapes": 1,
            "distributedInfo": {
                "backend": "nccl", "rank": self.rank, "world_size": self.world, "pg_count": len(groups),
                "pg_config": groups,
            },
        }  # fmt: skip
        events = ",\n  ".join(json.dumps(event, indent=2) for event in self.events)
        begin, end = json.dumps(head, indent=2)[:-2], '],\n  "traceName": "trace.json"\n}\n'
        return f'{begin},\n  "traceEvents": [\n  {events}\n  {end}'

    def _host(self, name: str, start: float, lasts: float, tid: int, said: dict[str, Any]) -> int:
        self.number += 1
        self._event("cpu_op", name, start, lasts, tid, {"External id": self.number, **said})
        return self.number

    def _kernel(
        self,
        name: str,
        start: float,
        lasts: float,
        correlation: int,
        external: int,
        said: dict[str, Any],
        stream: int = 7,
    ) -> None:
        known = {"External id": external, "device": 0, "context": 1, "stream": stream, "correlation": correlation}
        self._event("kernel", name, start, lasts, stream, {**known, "grid": [64, 1, 1], **said}, pid=0)

    def _event(
        self, category: str, name: str, start: float, lasts: float, tid: int, said: dict[str, Any], pid: int = PID
    ) -> None:
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": lasts, "args": said}
        )


def _strides(shape: list[Any]) -> list[Any]:
    if shape and isinstance(shape[0], list):
        return [_strides(one) for one in shape]
    found, step = [], 1
    for size in reversed(shape):
        found.insert(0, step)
        step *= size
    return found
