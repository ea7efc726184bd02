"""Even routing: rows per expert for models whose router has no values.

Routing depends on values, and tensors of the simulated device have none. A router is trained to use its experts equally
(Shazeer et al. 2017, section 4), so each expert is given the same number of rows, to within one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from legoai.cost.simulated.device import SIM, read_from_device
from legoai.lowering.graph.step.places import place_of, set_place
from legoai.runtime.parallelism import experts as runtime_experts
from legoai.runtime.torch_internals.compiler.graph_passes import get_proxy_mode
from legoai.runtime.torch_internals.patching import patched_attribute
from legoai.specs.models import mixtral


def even_parts(rows: int, parts: int) -> list[int]:
    """Split rows into parts that differ by at most one, the larger ones first."""
    share, rest = divmod(rows, parts)
    return [share + (index < rest) for index in range(parts)]


@contextlib.contextmanager
def even_routing() -> Iterator[None]:
    """While entered, row counts that are read from the simulated device are those of an even routing."""
    exchanged, kept, groups = runtime_experts.rows_exchanged, runtime_experts.rows_with_room, mixtral.rows_of_groups

    def rows_exchanged(counts: torch.Tensor, rows: int) -> list[list[int]]:
        if counts.device.type != SIM:
            return exchanged(counts, rows)
        _read(counts.numel() * counts.itemsize)
        sent = even_parts(rows, counts.shape[1])
        # Every rank of the group sends the same counts. One rank stands for all, so it receives what the first does, to
        # which each sends the most.
        return [sent, sent[:1] * len(sent)]

    def rows_with_room(place: torch.Tensor, capacity: int, experts: int) -> torch.Tensor:
        if place.device.type != SIM:
            return kept(place, capacity, experts)
        _read(place.itemsize)  # `nonzero` copies the number of its results to the host
        return place[: sum(min(size, capacity) for size in even_parts(len(place), experts))].clone()

    def rows_of_groups(group_sizes: torch.Tensor, rows: int) -> list[int]:
        if group_sizes.device.type != SIM:
            return groups(group_sizes, rows)
        _read(group_sizes.numel() * group_sizes.itemsize)
        return even_parts(rows, len(group_sizes))

    with (
        patched_attribute(runtime_experts, "rows_exchanged", rows_exchanged),
        patched_attribute(runtime_experts, "rows_with_room", rows_with_room),
        patched_attribute(mixtral, "rows_of_groups", rows_of_groups),
    ):
        yield


def _read(size: int) -> None:
    """Record a read from the device; in a traced step, for each run of its graph."""
    tracing = get_proxy_mode()
    if tracing is None:
        read_from_device(size)
        return
    graph = tracing.tracer.graph
    before = next(iter(reversed(graph.nodes)))
    node = graph.call_function(read_from_device, (size,))
    place = place_of(before)
    assert place is not None, "a node that was traced"
    set_place(node, place)
