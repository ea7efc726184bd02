"""Processes of a calibration, and the files that they write."""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from legoai.cost.calibration.calls import call_constants
from legoai.cost.calibration.output import check_output, write_output
from legoai.cost.calibration.profile import SHARE_OF_CALLS, calibrate
from legoai.cost.profiles import read_document, write_document
from legoai.runtime.device import processor_name
from legoai.runtime.host_memory import keep_freed_memory
from legoai.runtime.launching.torchrun import threads_per_process
from legoai.specs.device_file import toml_value


class NoDeviceError(ValueError):
    """The requested device is missing, or there are too few of it."""


def calibrate_machine(
    path: Path,
    *,
    device: str | None,
    seconds: float,
    processes: int,
    progress: Callable[[str], None],
) -> Mapping[str, Mapping[str, Any]]:
    """Measure this machine, write ``path`` and the profile beside it, and return the errors of held-out measurements.

    Args:
        path: the device file to write.
        device: `cpu`, `cuda`, or None for a gpu where there is one.
        seconds: to take, about.
        processes: among which collectives are measured; with one there are none.
        progress: called with a description of what is being measured.

    Raises:
        NoDeviceError: there is no such device here, or fewer than processes.
        OutputError: a file cannot be written.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and torch.cuda.device_count() < processes:
        raise NoDeviceError(f"{processes} processes need {processes} gpus, and there are {torch.cuda.device_count()}")
    check_output(path)
    if device == "cpu":
        keep_freed_memory()
    if processes == 1:
        document = calibrate(device=device, name=path.stem, seconds=seconds, progress=progress)
    else:
        document = _in_processes(device, path.stem, seconds, processes)
    write_output(path, device_file(path.stem, device, document, processes), document)
    return document["held_out"]  # type: ignore[no-any-return]


def _in_processes(device: str, name: str, seconds: float, processes: int) -> dict[str, Any]:
    """Measure in several processes of this machine, and return the profile's document."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "profile.json"
        arguments = (processes, str(Path(folder) / "store"), str(target), device, name, seconds)
        # A forked process need not import torch again; CUDA forbids forking once it is used.
        method = "fork" if device == "cpu" and "fork" in multiprocessing.get_all_start_methods() else "spawn"
        # Daemons end with this process, as after an interrupt that only it receives.
        start_processes(_member, arguments, nprocs=processes, daemon=True, start_method=method)  # type: ignore[no-untyped-call]
        document, _ = read_document(target)
    return document


def _member(rank: int, processes: int, store: str, target: str, *rest: Any) -> None:
    """Run one process of a calibration: all take part in the collectives, the first writes the result."""
    device, name, seconds = rest
    torch.set_num_threads(threads_per_process(processes) if device == "cpu" else torch.get_num_threads())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    if device == "cuda":
        torch.cuda.set_device(rank)
    said = _report if rank == 0 else _silent
    said("host time of calls")
    calls = call_constants(device, seconds * SHARE_OF_CALLS)
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=processes)
    try:
        group = dist.group.WORLD
        assert group is not None
        document = calibrate(device=device, name=name, seconds=seconds, group=group, calls=calls, progress=said)
        if rank == 0:
            write_document(Path(target), document)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _loopback() -> str:
    """Return the name of the loopback interface, which processes on one machine use."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), "")


def _report(text: str) -> None:
    import sys

    print(f"legoai: {text}", file=sys.stderr, flush=True)


def _silent(text: str) -> None:
    return None


def device_file(name: str, device: str, document: Mapping[str, Any], processes: int) -> str:
    """Return the device in the catalogue's schema, with its measured rates."""
    source = document["sources"][0]
    said = f"{source['from']}, {source['dated']}, torch {source['torch']}"
    rates = {rate: model["curve"]["peak"] for rate, model in sorted(document["products"].items()) if "curve" in model}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.device("cuda"))
        capacity, described = properties.total_memory, properties.name
        capability = (properties.major, properties.minor)
    else:
        capacity, described, capability = _host_memory(), processor_name(), (0, 0)
    lines = [
        f"name = {toml_value(name)}",
        f"description = {toml_value(described)}",
        f"kind = {toml_value(device)}",
        f"devices_per_host = {processes}",
        "",
        "[memory]",
        f"capacity_bytes = {capacity}",
        f"bandwidth_bytes_per_second = {document['movement']['elementwise']['rate']:.4g}",
        f"source = {toml_value(said)}",
        "",
        "[peak_flops_per_second]",
        *(f"{rate} = {value:.4g}" for rate, value in rates.items()),
        f"source = {toml_value(f'The best of the products that were measured: {said}')}",
        "",
        "[features]",
        f"symmetric_memory = {str(capability >= (9, 0)).lower()}",
        f"float8 = {str(capability >= (8, 9)).lower()}",
        f"mxfp8 = {str(capability >= (10, 0)).lower()}",
        f"source = {toml_value(f'From the compute capability, {capability[0]}.{capability[1]}')}",
    ]
    return "\n".join(lines) + "\n"


def _host_memory() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
