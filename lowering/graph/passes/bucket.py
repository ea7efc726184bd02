"""Buckets: the parameters of a unit share one all-gather in each direction, and their gradients one reduce-scatter.

    gather(a), wait, gather(b), wait              ->  gather(a, b), wait
    scatter(g), wait, scatter(h), wait            ->  scatter(g, h), wait

Where shards have replicas, the buffer of a reduction is then reduced over these as a whole. A bucket is gathered where
its first parameter is read, and reduced when its last gradient is available (Zhang et al. 2024, section 3.2.1).
Inductor's functions merge the collectives. Where gradients are reduced in another dtype, or padded, this is fused into
the copy into the buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import fx

from legoai.lowering.graph.step.collectives import in_order, is_padding, reduction_of, unshards
from legoai.lowering.graph.step.operators import SCATTERS, SUM_OVER_REPLICAS, WAIT
from legoai.lowering.graph.step.places import Makes, Place, place_of, set_place
from legoai.lowering.graph.step.step_graph import StepGraph
from legoai.runtime.torch_internals.compiler.graph_passes import CAST

_MODE: Final = "custom_ops"
"""One operator fills the buffer of a gather, with casts, and one that of a reduction."""


def bucket_units(graph: StepGraph) -> None:
    """Merge the collectives of each unit."""
    from legoai.runtime.torch_internals.compiler.buckets import merge_all_gather_bucket, merge_reduce_scatter_bucket

    place = in_order(graph)
    for gathers in list(_gathers(graph)):
        first, where = gathers[0], place_of(gathers[0])
        first_wait = min((next(iter(node.users)) for node in gathers), key=place.__getitem__)
        made, _ = merge_all_gather_bucket(
            graph.graph, gathers, mode=_MODE, insert_before=first, wait_insertion_point=first_wait
        )
        _settle(made, where, behind="unsharded_parameter")
    for scatters in list(_scatters(graph)):
        where = place_of(scatters[-1])
        made, _ = merge_reduce_scatter_bucket(graph.graph, scatters, mode=_MODE, insert_before=scatters[-1].next)
        _settle(_fill_at_once(graph, made), where)
        _sum_buffer(graph, made)


def _fill_at_once(graph: StepGraph, made: Sequence[fx.Node]) -> list[fx.Node]:
    """Pad and cast the gradients of a bucket while its buffer is filled, rather than one by one; return its nodes.

    Gradients of a stage are sums, which already have the dtype of the buffer.
    """
    from legoai.runtime.torch_internals.compiler.buckets import FILL, FILL_AND_PAD

    found = list(made)
    at = next(index for index, node in enumerate(found) if node.target is FILL)
    filling = found[at]
    given: list[fx.Node] = list(filling.args[0])  # type: ignore[arg-type]
    sources = [node.all_input_nodes[0] if is_padding(node) and len(node.users) == 1 else node for node in given]
    casts = [node for node in sources if node.target is CAST and len(node.users) == 1]
    uncast = [node.all_input_nodes[0] for node in casts]
    if not graph.is_stage and len(casts) == len(given) and len({node.meta["val"].dtype for node in uncast}) == 1:
        sources = uncast
    if sources == given:
        return found
    dtype = filling.meta["val"].dtype
    with graph.graph.inserting_before(filling):
        found[at] = graph.graph.call_function(FILL_AND_PAD, (sources, filling.args[1], dtype))
    found[at].meta = dict(filling.meta)
    filling.replace_all_uses_with(found[at])
    graph.graph.erase_node(filling)
    kept = set(sources)
    for node in dict.fromkeys((*given, *casts)):
        if node not in kept and not node.users:
            graph.graph.erase_node(node)
    return found


def _sum_buffer(graph: StepGraph, made: Sequence[fx.Node]) -> None:
    """Reduce the buffer of a bucket over replicas, instead of each gradient."""
    sums = [user for node in made for user in node.users if user.target is SUM_OVER_REPLICAS]
    if not sums:
        return
    scattered = next(node for node in made if node.target is WAIT)
    place = place_of(scattered)
    assert place is not None, "a node of a bucket"
    with graph.graph.inserting_after(scattered):
        total = graph.graph.call_function(SUM_OVER_REPLICAS, (scattered, *sums[0].args[1:]))
    with graph.graph.inserting_after(total):
        waited = graph.graph.call_function(WAIT, (total,))
    scattered.replace_all_uses_with(waited, delete_user_cb=lambda user: user is not total)
    for node in (total, waited):
        node.meta["val"] = scattered.meta["val"]
        set_place(node, place)
    set_place(total, place._replace(makes="communication"))
    for node in sums:
        [wait] = node.users
        wait.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        graph.graph.erase_node(wait)
        graph.graph.erase_node(node)


def _settle(made: Sequence[fx.Node], place: Place | None, *, behind: Makes = "") -> None:
    """Give the nodes of a bucket a place; they make a buffer up to the wait, and then ``behind``."""
    assert place is not None, "a node that was traced"
    waited = False
    for node in made:
        set_place(node, place._replace(makes=behind if waited else "communication"))
        waited = waited or node.target is WAIT


def _gathers(graph: StepGraph) -> Iterator[list[fx.Node]]:
    """Yield the gathers of each unit in forward, and those in backward."""
    found: dict[tuple[int, bool], list[fx.Node]] = {}
    unit_of = _unit_of(graph)
    for unshard in unshards(graph):
        place = place_of(unshard.gather)
        assert place is not None, "a node that was traced"
        found.setdefault((unit_of[unshard.parameter], place.phase == "forward"), []).append(unshard.gather)
    for gathers in found.values():
        yield from _of_one_dtype(gathers)


def _scatters(graph: StepGraph) -> Iterator[list[fx.Node]]:
    """Yield the reductions of each unit."""
    place, unit_of = in_order(graph), _unit_of(graph)
    found: dict[int, list[fx.Node]] = {}
    for parameter, gradient in graph.gradients().items():
        scatter = next((node for node in reduction_of(gradient) or () if node.target in SCATTERS), None)
        if scatter is not None:
            found.setdefault(unit_of[parameter], []).append(scatter)
    for scatters in found.values():
        yield from _of_one_dtype(sorted(scatters, key=place.__getitem__))


def _of_one_dtype(nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    found: dict[torch.dtype, list[fx.Node]] = {}
    for node in nodes:
        found.setdefault(node.meta["val"].dtype, []).append(node)
    yield from found.values()


def _unit_of(graph: StepGraph) -> dict[str, int]:
    return {name: index for index, unit in enumerate(graph.units) for name in unit.parameters}
