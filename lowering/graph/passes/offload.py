"""Offloading of activations: tensors that forward saves for backward are moved to host memory in between.

    forward     a, read(a) … backward    read(a)  ->  a, read(a), to host(a), …, free a
                                         backward     to device(a), …, wait, read(a)

A copy to the host begins after the last reader in forward, and the memory is freed when the next block's forward ends.
The copy back begins with the backward of the block before its first reader, in backward order. Both overlap
computation, on a stream of their own. Values are not changed.

Not offloaded are parameters, sharded or not; buffers and inputs of the model, which stay alive anyway; scalars; and
what the loss computes or reads, which backward reads at once.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from legoai.lowering.graph.passes.blocks import Blocks
from legoai.lowering.graph.passes.memory import held, roots
from legoai.lowering.graph.step.collectives import in_order
from legoai.lowering.graph.step.operators import WAIT
from legoai.lowering.graph.step.places import LOSS, Place, place_of, set_place
from legoai.lowering.graph.step.step_graph import StepGraph
from legoai.lowering.graph.step.values import changes, shows
from legoai.runtime.offloading.host_copies import HostCopies

_PARTS: Final = 16
"""Number of parts into which saved memory is divided to find how much exceeds a limit."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Memory that forward writes and backward reads.

    Attributes:
        root: the node that allocates it.
        shown: the nodes of forward that view or change it, in order.
        last: its last reader in forward.
        readers: the nodes after forward that read any of these, in order.
    """

    root: fx.Node
    shown: tuple[fx.Node, ...]
    last: fx.Node
    readers: tuple[fx.Node, ...]

    @property
    def bytes(self) -> int:
        """The size of the memory."""
        return int(self.root.meta["val"].nbytes)


def offload_activations(
    graph: StepGraph, *, most: int | None = None, limit: int | None = None, moments: int = 0
) -> None:
    """Copy tensors saved for backward to the host, and back ahead of their first readers.

    Args:
        graph: whose all-gathers are in buckets.
        most: bytes to offload, spread evenly over saved memory; None for all.
        limit: of the device's memory: only what exceeds it is offloaded.
        moments: under a limit, values per element of a parameter that the optimizer keeps on the device; those that are
            offloaded already are not counted while they are away.
    """
    if limit is not None:
        most = _least_under(graph, limit, moments)
    blocks, copies = Blocks(graph), HostCopies()
    leaving: list[tuple[Saved, fx.Node]] = []
    behind: dict[fx.Node, fx.Node] = {}
    every = list(saved_activations(graph))
    for saved in every if most is None else evenly(every, most):
        leaving.append((saved, _leave(graph, saved, blocks, copies, behind)))
    place = in_order(graph)
    for saved, host in sorted(leaving, key=lambda item: place[item[0].readers[0]]):
        _return(graph, saved, host, blocks, copies)


def _least_under(graph: StepGraph, limit: int, moments: int) -> int:
    """Return the fewest bytes to offload, to a sixteenth of all; offloading more would not lower the peak further."""
    total = sum(saved.bytes for saved in saved_activations(graph))

    def peak(parts: int) -> int:
        trial = graph.copied()
        offload_activations(trial, most=total * parts // _PARTS)
        return max(held(trial, moments))

    if (now := max(held(graph, moments))) <= limit or now <= (least := max(limit, peak(_PARTS))):
        return 0
    return total * bisect.bisect_left(range(_PARTS), True, lo=1, key=lambda parts: peak(parts) <= least) // _PARTS


def evenly(every: Sequence[Saved], most: int) -> Iterator[Saved]:
    """Yield saved memory of about ``most`` bytes, spread evenly so that all blocks overlap equally many copies."""
    total, seen, taken = sum(saved.bytes for saved in every), 0, 0
    for saved in every:
        seen += saved.bytes
        if (taken + saved.bytes) * max(total, most) <= most * seen:
            taken += saved.bytes
            yield saved


def saved_activations(graph: StepGraph) -> Iterator[Saved]:
    """Yield memory that forward saves for backward and that may be offloaded, in order of allocation."""
    place = in_order(graph)
    device = next(iter(graph.inputs().values())).meta["val"].device
    shown: dict[fx.Node, list[fx.Node]] = {}
    for node, root in roots(graph).items():
        if node.op == "output" or is_of_backward(node):
            continue
        shown.setdefault(root, []).append(node)
    for root, nodes in shown.items():
        users = sorted({user for node in nodes for user in node.users}, key=place.__getitem__)
        before = [user for user in users if not is_of_backward(user)]
        behind = [user for user in users if is_of_backward(user)]
        if not behind or not _may_leave(root, before, device):
            continue
        last = max((*before, root), key=place.__getitem__)
        yield Saved(root, tuple(nodes[1:]), last, tuple(behind))


def is_of_backward(node: fx.Node) -> bool:
    """Whether a node runs after forward, as recomputation does."""
    place = place_of(node)
    return place is not None and place.phase != "forward"


def _may_leave(root: fx.Node, before: list[fx.Node], device: torch.device) -> bool:
    place, value = place_of(root), root.meta.get("val")
    if place is None or place.makes or place.of_unit or root.op != "call_function":
        return False
    if not isinstance(value, torch.Tensor) or value.device.type != device.type or not value.ndim:
        return False
    readers = [place_of(user) for user in before]
    return place.module != LOSS and all(reader is not None and reader.module != LOSS for reader in readers)


def _leave(
    graph: StepGraph, saved: Saved, blocks: Blocks, copies: HostCopies, behind: dict[fx.Node, fx.Node]
) -> fx.Node:
    """Copy to the host after forward's last reader, and wait where the next block's forward ends.

    Args:
        graph: of the step.
        saved: the memory to offload.
        blocks: of the graph.
        copies: of all offloaded memory.
        behind: the last copy or wait that was inserted after a node.

    Returns:
        The node that returns the host tensor.
    """
    end = blocks.end_of_forward(blocks.at(saved.last) + 1)
    begun = _put_behind(graph, saved.last, behind, copies.to_host, (saved.root,))
    ended = _put_behind(graph, end, behind, copies.wait_on_host, (begun, saved.root))
    for node in (begun, ended):
        set_place(node, _place(saved)._replace(phase="forward", makes=""))
    return ended


def _put_behind(
    graph: StepGraph, node: fx.Node, behind: dict[fx.Node, fx.Node], target: Callable[..., Any], args: tuple[Any, ...]
) -> fx.Node:
    """Insert a call after a node, and after the calls that were inserted there before."""
    with graph.graph.inserting_after(behind.get(node, node)):
        made = behind[node] = graph.graph.call_function(target, args)
    return made


def _return(graph: StepGraph, saved: Saved, host: fx.Node, blocks: Blocks, copies: HostCopies) -> None:
    """Copy back with the backward of the block before the first reader's, and let backward read the copy."""
    first = saved.readers[0]
    reader = place_of(first)
    assert reader is not None, "a node that was traced"
    begin = blocks.begin_of_backward(blocks.of(reader))
    with graph.graph.inserting_before(first if begin is None or first < begin else begin):
        begun = graph.graph.call_function(copies.to_device, (host,))
    again: dict[fx.Node, fx.Node] = {}
    with graph.graph.inserting_before(first):
        arrived = again[saved.root] = graph.graph.call_function(copies.wait_on_device, (begun,))
        begun.meta["val"] = arrived.meta["val"] = saved.root.meta["val"]
        for node in saved.shown:
            if node.target is WAIT or changes(node):
                [*_, source] = [item for item in node.all_input_nodes if item in again]
                again[node] = again[source]
            else:
                again[node] = graph.graph.node_copy(node, lambda source: again.get(source, source))
    for node in (begun, *again.values()):
        set_place(node, _place(saved))
    for later in saved.readers:
        for node, made in again.items():
            later.replace_input_with(node, made)
    for node in reversed(again.values()):
        if shows(node) and not node.users:
            graph.graph.erase_node(node)
    for node in reversed(saved.shown):
        if shows(node) and not node.users:
            graph.graph.erase_node(node)


def _place(saved: Saved) -> Place:
    """Return the place of the copy back."""
    place = place_of(saved.root)
    assert place is not None, "a node that was traced"
    return Place(place.module, "backward", "activation")
