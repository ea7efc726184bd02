"""Chrome traces of torch's profiler: the events of one rank's file that a profile is fitted to."""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO

from legoai.specs.files import require_regular

_CHUNK: Final = 2**20
_LONGEST: Final = 2**25
"""Most characters of one event, or before the events; a longer text is no trace of torch's profiler."""
_BEGIN: Final = re.compile(r'"traceEvents"\s*:\s*\[')
_NAME: Final = re.compile(r"rank[-_](\d+)")
_HOST: Final = frozenset({"cpu_op", "user_annotation"})
_LAUNCHES: Final = frozenset({"cuda_runtime", "cuda_driver"})
_ON_DEVICE: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_ARGUMENTS: Final = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")


class TraceError(ValueError):
    """A file is no trace of torch's profiler, is incomplete, or lacks required data."""


@dataclass(frozen=True, slots=True)
class Call:
    """An operator or annotation on a thread of the host, in microseconds of the trace's clock.

    ``arguments`` holds shapes, dtypes, strides and numbers as the profiler wrote them, in that order; None where it did
    not record them.
    """

    name: str
    thread: tuple[Any, Any]
    start: float
    end: float
    external: int
    arguments: tuple[Any, Any, Any, Any] | None


@dataclass(frozen=True, slots=True)
class Launch:
    """A driver call that enqueues work on the device, or waits for it."""

    name: str
    thread: tuple[Any, Any]
    start: float
    correlation: int


@dataclass(frozen=True, slots=True)
class DeviceKernel:
    """A kernel, copy or fill on the device; ``collective`` holds NCCL's arguments where it is one of its kernels."""

    name: str
    start: float
    end: float
    correlation: int
    external: int
    bytes: int
    collective: Mapping[str, Any] | None


@dataclass(slots=True, kw_only=True)
class TraceFile:
    """One rank's trace.

    Attributes:
        path: of the file.
        rank: of the process, by the trace or else by the file's name.
        world: ranks of the run.
        groups: names and ranks of its process groups, where the profiler recorded them.
        device: properties of the first GPU; None where there was none.
        calls: on the host.
        launches: on the host.
        kernels: on the device.
    """

    path: Path
    rank: int = 0
    world: int = 1
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    device: Mapping[str, Any] | None = None
    calls: list[Call] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    kernels: list[DeviceKernel] = field(default_factory=list)

    @property
    def on_device(self) -> bool:
        """Whether kernels of a GPU were recorded."""
        return bool(self.kernels)


def read_trace(path: Path) -> TraceFile:
    """Read one trace event by event, so that only the needed events are held in memory.

    Raises:
        TraceError: the file cannot be read, is no trace of torch's profiler, or ends in the middle.
    """
    try:
        require_regular(path)
        with (
            gzip.open(path, "rt", encoding="utf-8", errors="replace")
            if _compressed(path)
            else path.open(encoding="utf-8", errors="replace") as file
        ):
            found = _read(path, file)
    except RecursionError as error:
        raise TraceError(f"{path} is damaged: {error}; profile a step again") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path} is incomplete: {error}; profile a step again") from error
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    if not found.calls:
        raise TraceError(f"{path} has no operators: it is no trace of torch's profiler, or nothing ran meanwhile")
    has_collectives = any(kernel.collective for kernel in found.kernels)
    if not has_collectives and not any(call.arguments for call in found.calls):
        raise TraceError(
            f"{path} has no shapes of operands, without which times cannot be compared; "
            "`legoai run FILE -- --profile-step N` records them"
        )
    return found


def _compressed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _read(path: Path, file: TextIO) -> TraceFile:
    head, rest = _header(path, file)
    found = TraceFile(path=path)
    _describe(found, head)
    for event in _events(path, file, rest):
        if isinstance(event, dict) and event.get("ph") == "X":
            _keep(found, event)
    return found


def _header(path: Path, file: TextIO) -> tuple[Mapping[str, Any], str]:
    """Return the text before the events, and what was read beyond it."""
    text = ""
    while (match := _BEGIN.search(text)) is None:
        chunk = file.read(_CHUNK)
        if not chunk or len(text) > _LONGEST:
            raise TraceError(f"{path} has no `traceEvents`: it is no trace of torch's profiler")
        text += chunk
    try:
        head = json.loads(text[: match.end()] + "]}")
    except ValueError as error:
        raise TraceError(f"{path} is no JSON: {error}") from error
    if not isinstance(head, dict):
        raise TraceError(f"{path} is no trace of torch's profiler")
    return head, text[match.end() :]


def _events(path: Path, file: TextIO, text: str) -> Iterator[Any]:
    """Yield the events, each decoded once it is complete."""
    decoder, at = json.JSONDecoder(), 0
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at < len(text) and text[at] == "]":
            return
        try:
            event, at = decoder.raw_decode(text, at)
        except ValueError as error:
            chunk = file.read(_CHUNK)
            if not chunk:
                raise TraceError(
                    f"{path} ends in the middle: its run was stopped while it wrote it; profile a step again"
                ) from error
            if len(text) - at > _LONGEST:
                raise TraceError(f"{path} is damaged: {error}; profile a step again") from error
            text, at = text[at:] + chunk, 0
            continue
        yield event


def _describe(found: TraceFile, head: Mapping[str, Any]) -> None:
    """Read the properties before the events."""
    world = head.get("distributedInfo")
    named = _NAME.search(found.path.name)
    if isinstance(world, dict):
        found.rank, found.world = _whole(world.get("rank"), 0), max(1, _whole(world.get("world_size"), 1))
        groups = world.get("pg_config")
        found.groups = tuple(
            (str(group.get("pg_name", "")), tuple(rank for rank in group["ranks"] if isinstance(rank, int)))
            for group in (groups if isinstance(groups, list) else ())
            if isinstance(group, dict) and isinstance(group.get("ranks"), list)
        )
    elif named is not None:
        found.rank = int(named[1])
        found.world = found.rank + 1
    devices = head.get("deviceProperties")
    if isinstance(devices, list) and devices and isinstance(devices[0], dict):
        found.device = devices[0]


def _keep(found: TraceFile, event: Mapping[str, Any]) -> None:
    start, lasts, said = event.get("ts"), event.get("dur", 0), event.get("args")
    if not isinstance(start, int | float) or not isinstance(lasts, int | float) or not math.isfinite(start + lasts):
        return
    said = said if isinstance(said, dict) else {}
    category, name, thread = event.get("cat"), str(event.get("name", "")), (event.get("pid"), event.get("tid"))
    if any(isinstance(value, list | dict) for value in (category, *thread)):
        raise TraceError(f"{found.path} is damaged: {name} has no category or no thread; profile a step again")
    if category in _HOST:
        number = _whole(said.get("External id"), -1)
        found.calls.append(Call(name, thread, start, start + lasts, number, _arguments(said)))
    elif category in _LAUNCHES:
        found.launches.append(Launch(name, thread, start, _whole(said.get("correlation"), -1)))
    elif category in _ON_DEVICE:
        is_collective = name.lower().startswith("nccl") or "Collective name" in said
        found.kernels.append(
            DeviceKernel(
                name, start, start + lasts, _whole(said.get("correlation"), -1), _whole(said.get("External id"), -1),
                _whole(said.get("bytes"), 0), said if is_collective else None,
            )
        )  # fmt: skip


def _arguments(said: Mapping[str, Any]) -> tuple[Any, Any, Any, Any] | None:
    dims, types, strides, values = (said.get(key) for key in _ARGUMENTS)
    if not isinstance(dims, list) or not isinstance(types, list) or len(dims) != len(types):
        return None
    return (dims, types, strides, values) if all(isinstance(shape, list) for shape in dims) else None


def _whole(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise
