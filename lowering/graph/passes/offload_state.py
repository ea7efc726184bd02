"""Offloading of the optimizer's state during forward and backward (Tanaka et al. 2025, section 4.4, Algorithm 2).

A fragment is the optimizer's state of one parameter. It leaves the device in the first micro batch of a step, and
returns by the end of the last.

    forward     to host(w), …, free(w), …
    backward    …, to device(w), …, wait(w), the optimizer's step

Under a memory limit only the excess is offloaded. The paper takes fragments in order; here they are chosen by size, as
an embedding's state is a hundred times that of a small matrix, and cannot leave in part. All copies to the host begin
with the step; the wait for each is placed where the memory curve of the graph needs its room. A copy back begins where
there is room from there to the end. The paper's Algorithm 2 covers forward only, and describes the way back in prose;
here both use one curve.

Without a limit, copies and waits are spread evenly over the blocks, so that the state is away when forward ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from torch import fx

from legoai.lowering.graph.passes.blocks import Blocks
from legoai.lowering.graph.passes.memory import held_without_state, state_bytes
from legoai.lowering.graph.passes.overlap import begin_of_backward
from legoai.lowering.graph.step.places import Phase, Place, set_place
from legoai.lowering.graph.step.step_graph import StepGraph
from legoai.runtime.offloading.state_copies import StateCopies
from legoai.specs.fragments import Fragment, within

_MAKES: Final = "optimizer_state"


class Places(NamedTuple):
    """The nodes before which the copies and waits of a fragment are inserted."""

    fragment: Fragment
    leave: fx.Node
    free: fx.Node
    back: fx.Node


def offload_optimizer_state(
    graph: StepGraph, *, moments: int = 2, most: int | None = None, limit: int | None = None
) -> None:
    """Copy the optimizer's state to the host and back while the graph runs.

    Args:
        graph: under a limit, whose activations are offloaded already, if at all.
        moments: values per element of a parameter that the optimizer keeps.
        most: bytes to offload, as far as whole fragments fit; None for all.
        limit: of the device's memory: only what exceeds it is offloaded.
    """
    fragments = [Fragment(name, size) for name, size in state_bytes(graph, moments).items()]
    if limit is not None:
        chosen = _under(graph, fragments, limit)
    elif most is not None:
        chosen = _spread(graph, within(fragments, most))
    else:
        chosen = _spread(graph, fragments)
    _insert(graph, chosen)


def sufficient(fragments: Sequence[Fragment], excess: int) -> list[Fragment]:
    """Return fragments of little more than the excess, in order, none of them needlessly; all if it is more."""
    found = set(within(fragments, excess))
    left = excess - sum(fragment.bytes for fragment in found)
    others = [fragment for fragment in fragments if fragment not in found]
    if left > 0 and others:
        last = min(others, key=lambda one: one.bytes)  # each is larger than what is left
        found.add(last)
        found -= set(within([fragment for fragment in fragments if fragment in found], last.bytes - left))
    return [fragment for fragment in fragments if fragment in found]


def _insert(graph: StepGraph, chosen: Sequence[Places]) -> None:
    copies = graph.state = StateCopies()
    output = graph.graph.output_node()

    def put(target: Callable[[str], None], before: fx.Node, fragment: Fragment, phase: Phase) -> None:
        with graph.graph.inserting_before(before):
            made = graph.graph.call_function(target, (fragment.parameter,))
        set_place(made, Place(fragment.parameter.rpartition(".")[0], phase, _MAKES))

    for fragment, leave, _, _ in chosen:
        put(copies.state_to_host, leave, fragment, "forward")
    for fragment, _, free, _ in chosen:
        put(copies.free_state, free, fragment, "forward")
    returning = chosen[::-1]
    for fragment, _, _, back in returning:
        put(copies.state_to_device, back, fragment, "backward")
    for fragment, *_ in returning:
        put(copies.wait_for_state, output, fragment, "backward")


def _under(graph: StepGraph, fragments: Sequence[Fragment], limit: int) -> list[Places]:
    """Place the copies of what exceeds a limit, as the memory curve of the graph allows."""
    curve = held_without_state(graph)
    nodes: list[fx.Node] = list(graph.graph.nodes)
    begin = next(index for index, node in enumerate(nodes) if node.op != "placeholder")
    curve, nodes = curve[begin:], nodes[begin:]
    frees = frees_under(curve, fragments, limit)
    behind = max([nodes.index(begin_of_backward(graph)), *(index + 1 for _, index in frees)])
    first = min(behind, len(nodes) - 1)
    state = sum(fragment.bytes for fragment in fragments)
    backs = backs_under(curve, [fragment for fragment, _ in frees], state, limit, first=first)
    return [
        Places(fragment, nodes[0], nodes[free], nodes[back])
        for (fragment, free), back in zip(frees, backs, strict=True)
    ]


def frees_under(curve: Sequence[int], fragments: Sequence[Fragment], limit: int) -> list[tuple[Fragment, int]]:
    """Return the fragments to offload, in order, and the index before which each must be freed.

    Args:
        curve: bytes of everything but the state, by index.
        fragments: of the state.
        limit: of all bytes.
    """
    resident, peak = sum(fragment.bytes for fragment in fragments), max(curve)
    found: list[tuple[Fragment, int]] = []
    place = 0
    for fragment in sufficient(fragments, peak + resident - limit):
        while curve[place] + resident <= limit:
            place += 1
        found.append((fragment, place))
        resident -= fragment.bytes
    return found


def backs_under(curve: Sequence[int], away: Sequence[Fragment], state: int, limit: int, *, first: int) -> list[int]:
    """Return for each offloaded fragment the earliest index from which on there is room; the last one returns first.

    Where there is no room earlier, a fragment returns at the last index, after which the optimizer needs it.

    Args:
        curve: bytes of everything but the state, by index.
        away: fragments in the order in which they were offloaded.
        state: bytes of all fragments.
        limit: of all bytes.
        first: index before which none returns.
    """
    ahead = list(accumulate(reversed(curve), max))[::-1]
    resident = state - sum(fragment.bytes for fragment in away)
    place, found = first, list[int]()
    for fragment in reversed(away):
        resident += fragment.bytes
        while place < len(curve) - 1 and ahead[place] + resident > limit:
            place += 1
        found.append(place)
    return found[::-1]


def _spread(graph: StepGraph, fragments: Sequence[Fragment]) -> list[Places]:
    """Spread copies evenly over the forwards of blocks, and over their backwards."""
    blocks, output = Blocks(graph), graph.graph.output_node()
    nodes: list[fx.Node] = list(graph.graph.nodes)
    begin = next(node for node in nodes if node.op != "placeholder")
    last = max(0, blocks.count - 2)  # the block before the loss

    def ends(number: int) -> fx.Node:
        return begin if number < 0 else blocks.end_of_forward(min(number, last)).next

    found = []
    for fragment, block in _evenly(fragments, last + 1):
        back = blocks.begin_of_backward(block - 1) or output
        found.append(Places(fragment, ends(block - 1), ends(block + 1), back))
    return found


def _evenly(fragments: Sequence[Fragment], parts: int) -> Iterator[tuple[Fragment, int]]:
    """Yield each fragment with its part, so that all parts have about as many bytes."""
    total, before = sum(fragment.bytes for fragment in fragments), 0
    for fragment in fragments:
        yield fragment, before * parts // max(1, total)
        before += fragment.bytes
