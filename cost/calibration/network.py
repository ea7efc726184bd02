"""Measured times of collectives among processes on this machine."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from legoai.cost.network.algorithms import wire_bytes
from legoai.cost.trace.records import CollectiveKind
from legoai.runtime.torch_internals.distributed.collectives import gather_into, scatter_into


def collectives(
    group: dist.ProcessGroup, device: str, seconds: float, progress: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Measure the collectives among the ranks of ``group``, by kind and number of ranks; called on all ranks.

    A time is that of the slowest rank, and the minimum of several repetitions; on a CPU, whose cores the ranks share
    with each other and with gloo's threads, the median. On a CPU subgroups are measured too, as the axes of a mesh form
    them: all subgroups of equal size at the same time.
    """
    world = dist.get_world_size(group)
    parts = [count for count in range(2, world) if world % count == 0 and device == "cpu"]
    links: dict[str, dict[str, Any]] = {}
    for count in (*parts, world):
        part = group if count == world else _part_of(group, count)
        found = _among(part, group, device, seconds / (len(parts) + 1), progress)
        for kind, curves in found.items():
            links.setdefault(kind, {}).update(curves)
    return links


def _part_of(group: dist.ProcessGroup, count: int) -> dist.ProcessGroup:
    """Return this rank's subgroup of ``count`` neighbouring ranks."""
    everyone = dist.get_process_group_ranks(group)
    parts = [dist.new_group(everyone[first : first + count]) for first in range(0, len(everyone), count)]
    own = parts[dist.get_rank(group) // count]
    assert isinstance(own, dist.ProcessGroup)
    return own


def _among(
    group: dist.ProcessGroup,
    everyone: dist.ProcessGroup,
    device: str,
    seconds: float,
    progress: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """Measure the collectives among the ranks of ``group``, one of the subgroups of ``everyone``."""
    ranks = dist.get_world_size(group)
    largest = 2**24 if device == "cpu" else 2**30
    sizes = [2**power for power in range(10, int(math.log2(largest)) + 1, 2)]
    kinds: tuple[CollectiveKind, ...] = (
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "send",
    )
    share = seconds / (len(kinds) * len(sizes))
    links: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        progress(f"{kind} among {ranks} ranks")
        points = []
        for size in sizes:
            run = _collective(kind, size, group, device)
            if run is None:
                break
            points.append([float(size), _together(run, share, everyone, device)])
        if points:
            members = 2 if kind == "send" else ranks
            rates = [wire_bytes(kind, size, members) / time for size, time in points]
            links[kind] = {
                str(members): {
                    "sigmoid": [max(rates), 1.0, math.log(2**18)],
                    "latency": min(time for _, time in points),
                    "points": points,
                    "derived": "",
                }
            }
    return links


def _together(run: Callable[[], object], seconds: float, group: dist.ProcessGroup, device: str) -> float:
    """Time repetitions, equally many on all ranks, by the slowest rank; return the minimum, on a CPU the median."""
    run()
    begin = time.perf_counter()
    run()
    once = torch.tensor([time.perf_counter() - begin], device=device)
    dist.all_reduce(once, op=dist.ReduceOp.MAX, group=group)
    repetitions = max(3, min(100, int(seconds / max(float(once), 1e-6))))
    times = []
    for _ in range(repetitions):
        dist.barrier(group)
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        slowest = torch.tensor([time.perf_counter() - start], device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        times.append(float(slowest))
    return statistics.median(times) if device == "cpu" else min(times)


def _collective(kind: CollectiveKind, size: int, group: dist.ProcessGroup, device: str) -> Callable[[], object] | None:
    """Return a run of one collective on a buffer of ``size`` bytes in fp32; None where the backend lacks it."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    count = size // 4 // ranks * ranks
    whole, part = torch.zeros(count, device=device), torch.zeros(count // ranks, device=device)
    other = torch.zeros(count, device=device)
    match kind:
        case "all_reduce":
            return lambda: dist.all_reduce(whole, group=group)
        case "all_gather":
            return lambda: gather_into(whole, part, group=group)
        case "reduce_scatter":
            return lambda: scatter_into(part, whole, group=group)
        case "all_to_all":
            return lambda: dist.all_to_all_single(other, whole, group=group)
        case "broadcast":
            return lambda: dist.broadcast(whole, src=dist.get_global_rank(group, 0), group=group)
        case "send":
            return lambda: _exchange(whole, rank, group)
        case _:
            return None


def _exchange(buffer: torch.Tensor, rank: int, group: dist.ProcessGroup) -> None:
    """Send from the group's first rank to its second."""
    if rank == 0:
        dist.send(buffer, dst=dist.get_global_rank(group, 1), group=group)
    elif rank == 1:
        dist.recv(buffer, src=dist.get_global_rank(group, 0), group=group)
