"""De-duplication of unshards: a parameter that is read several times is gathered once, and its gradient reduced once.

A tied parameter is read by two modules, and a checkpointed module reads its parameters again. Gradients of several
reads are added up before they are reduced, in the dtype in which they were computed, as `fully_shard` does.

    gather(w) … gather(w)                         ->  gather(w)
    reduce(g) + reduce(h)                         ->  reduce(g + h)
"""

from __future__ import annotations

from torch import fx

from legoai.lowering.graph.step.collectives import reduction_of, unshards
from legoai.lowering.graph.step.operators import ADD, SLICE
from legoai.lowering.graph.step.places import place_of
from legoai.lowering.graph.step.step_graph import StepGraph


def deduplicate_unshards(graph: StepGraph) -> None:
    """Gather each parameter once, where it is first read, and reduce its gradient once."""
    first: dict[str, fx.Node] = {}
    for unshard in list(unshards(graph)):
        kept = first.setdefault(unshard.parameter, unshard.wait)
        if kept is not unshard.wait:
            unshard.wait.replace_all_uses_with(kept)
            for node in reversed(unshard.chain):
                graph.graph.erase_node(node)
            _cut_once(graph, kept)
    for parameter, gradient in graph.gradients().items():
        if gradient.target is ADD:
            _reduce_once(graph, parameter, gradient)


def _cut_once(graph: StepGraph, gathered: fx.Node) -> None:
    """Cut the padding off a gathered parameter once."""
    cuts = [user for user in gathered.users if user.target is SLICE and (place := place_of(user)) and place.of_unit]
    for cut in cuts[1:]:
        cut.replace_all_uses_with(cuts[0])
        graph.graph.erase_node(cut)


def _reduce_once(graph: StepGraph, parameter: str, total: fx.Node) -> None:
    """Replace a sum of reductions, a parameter's gradient, by one reduction of the sum."""
    parts, sums = _summands(total)
    chains = [chain for chain in map(reduction_of, parts) if chain is not None]
    if len(chains) < len(parts):
        return
    with graph.graph.inserting_before(total):
        made: fx.Node = chains[0][0].all_input_nodes[0]
        for chain in chains[1:]:
            source = chain[0].all_input_nodes[0]
            made = graph.graph.call_function(ADD, (made, source))
            made.meta.update(source.meta)
        for node in chains[-1]:
            made = graph.graph.node_copy(node, lambda _, made=made: made)  # type: ignore[misc]
    graph.set_gradient(parameter, made)
    for node in (*sums, *(node for chain in chains for node in reversed(chain))):
        graph.graph.erase_node(node)


def _summands(total: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the summands, and the nodes that add, the outermost first."""
    if total.target is not ADD or len(total.all_input_nodes) != 2:
        return [total], []
    parts: list[fx.Node] = []
    sums = [total]
    for source in total.all_input_nodes:
        found, inner = _summands(source)
        parts += found
        sums += inner
    return parts, sums
