"""Device memory of one rank: reserved by PyTorch, used outside it, and whether the sum fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from legoai.cost.kernels.work import is_product
from legoai.cost.machine.cluster import Machine
from legoai.cost.memory.reserving import reserve
from legoai.cost.memory.storages import MemoryReport, memory
from legoai.cost.trace.records import POINT_TO_POINT, Collective, Kernel
from legoai.cost.trace.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Device memory of one rank, in bytes.

    Attributes:
        reserved: maximum, as of `torch.cuda.max_memory_reserved()`, including the workspaces of cuBLAS, which torch
            allocates from its own allocator. On a CPU, which has no such allocator, it is the peak of active memory.
        workspace: of `reserved`, the workspaces of cuBLAS, one for each stream with matrix products.
        outside: what `nvidia-smi` counts in addition: `cuda_context`, and `nccl` for NCCL's buffers.
        capacity: of the device; None where it is not known.
        retries: how often the allocator must free cached segments to stay within the capacity.
        fits: whether everything fits; None without a capacity.
    """

    reserved: int
    workspace: int
    outside: Mapping[str, int]
    capacity: int | None
    retries: int
    fits: bool | None

    @property
    def total(self) -> int:
        """The total use of the device."""
        return self.reserved + sum(self.outside.values())


def memory_use(trace: Trace, machine: Machine) -> MemoryUse:
    """Run a rank's storages through the allocator, and add memory outside it."""
    capacity = machine.device.capacity
    if machine.device.kind == "cpu":
        peak = memory(trace).peak
        return MemoryUse(
            reserved=peak, workspace=0, outside={}, capacity=capacity, retries=0,
            fits=None if capacity is None else peak <= capacity,
        )  # fmt: skip
    workspace = _workspace(trace, machine)
    outside = _outside(trace, machine)
    left = None if capacity is None else capacity - workspace - sum(outside.values())
    found = reserve(trace, capacity=left, expandable=machine.expandable_segments)
    return MemoryUse(
        reserved=found.peak_reserved + workspace, workspace=workspace, outside=outside, capacity=capacity,
        retries=found.retries, fits=None if capacity is None else found.fits,
    )  # fmt: skip


def least_beside(machine: Machine, groups: Iterable[int]) -> int:
    """Bytes that a rank takes beside the memory of tensors, at least: as :func:`memory_use` adds them.

    Args:
        machine: on which it runs.
        groups: the ranks of each group in which it communicates, as far as they are known.
    """
    if machine.device.kind == "cpu":
        return 0
    workspace = int(machine.constant("cublas_workspace_bytes") or 0)
    context = int(machine.constant("context_bytes") or 0)
    return workspace + context + sum(_buffer(machine, ranks) for ranks in groups)


def needs_of(trace: Trace, machine: Machine) -> tuple[MemoryReport, MemoryUse]:
    """Active memory and device memory of a rank, for callers that need nothing else of its trace."""
    found = memory(trace), memory_use(trace, machine)
    trace.forget()
    return found


def _workspace(trace: Trace, machine: Machine) -> int:
    one = machine.constant("cublas_workspace_bytes")
    if one is None:
        return 0
    streams = {(item.stream, item.op) for item in trace.once_each() if isinstance(item, Kernel)}
    return int(one) * len({stream for stream, op in streams if is_product(op)})


def _outside(trace: Trace, machine: Machine) -> dict[str, int]:
    """Bytes that torch does not count. A communicator is created when its group first communicates."""
    groups: dict[tuple[str, tuple[int, ...]], int] = {}
    each = trace.once_each(translated=True)
    calls = (item for item in each if isinstance(item, Collective) and item.kind != "peer_copy")
    alike = {(id(item.ranks), item.kind, item.axis, item.communicator, item.members): item for item in calls}
    for item in alike.values():
        name, members = _group(item)
        if len(members) > 1:
            groups[name, members] = max(groups.get((name, members), 0), _peers(item.kind, len(members)))
    found = {"cuda_context": int(machine.constant("context_bytes") or 0)}
    buffers = sum(_buffer(machine, len(ranks)) for _, ranks in groups)
    peer = machine.constant("nccl_all_to_all_peer_bytes") or 0.0
    per_host = machine.network.devices_per_host
    for (_, ranks), peers in groups.items():
        here = sum(rank // per_host == trace.rank // per_host for rank in ranks)
        buffers += int(peer * min(peers, max(0, here - 1)))
    if buffers:
        found["nccl"] = buffers
    return {name: size for name, size in found.items() if size}


def _group(record: Collective) -> tuple[str, tuple[int, ...]]:
    """Return the name and the ranks of a communicator.

    NCCL runs sends and receives of a batch on the communicator of their group, and others on one of the two ranks
    (`ProcessGroupNCCL::pointToPoint`), which serves both directions.
    """
    if record.kind in POINT_TO_POINT and not record.members:
        return "between", tuple(sorted(record.ranks))
    return record.communicator or record.axis, tuple(sorted(record.members or record.ranks))


def _peers(kind: str, ranks: int) -> int:
    """Other ranks of a group to which a rank is connected by a collective beyond NCCL's rings and trees."""
    return {"all_to_all": ranks - 1, "permute": min(2, ranks - 1)}.get(kind, 0)


def _buffer(machine: Machine, ranks: int) -> int:
    """Bytes of NCCL's buffers for a group of so many ranks."""
    if ranks < 2:
        return 0
    return int(machine.constant("nccl_pair_bytes" if ranks == 2 else "nccl_communicator_bytes") or 0)
