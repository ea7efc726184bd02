"""Split of a stage's graph into those of its actions: forward, backward, and the reduction of a pass's gradients.

The schedule of a pipeline runs forward and backward of a micro batch separately. Values that forward computes and
backward reads cross from one graph to the other. Parameters are gathered by the first forward of a pass, and stay
gathered until its end, except for those of units that reshard after forward, which each forward and each backward
gathers. Gradients of gathered parameters are accumulated over the micro batches of a pass, and reduced once, as under
the eager backend.

    gather(w), forward(x, w), backward(g, w), scatter(dw)
        ->  forward        x             ->  gather(w), forward(x, w), w
            later forward  x, w          ->  forward(x, w)
            backward       g, w, …       ->  backward(g, w), dw
            later backward g, w, …, sum  ->  backward(g, w), sum += dw
            reduction      sum of dw     ->  scatter(dw)

Where the schedule splits backward, the computation of the stage's input gradient is one graph, and the rest of backward
another, which reads values of the first.

            input backward    g, w, …    ->  dx, …
            weight backward   w, …       ->  dw
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from legoai.lowering.graph.step.places import place_of, set_place
from legoai.lowering.graph.step.step_graph import ActionGraphs, StepGraph
from legoai.lowering.graph.step.values import is_part, shown_by

_CLONE: Final[Any] = torch.ops.aten.clone.default
_ADD_IN_PLACE: Final[Any] = torch.ops.aten.add_.Tensor


def actions_of(graph: StepGraph) -> ActionGraphs:
    """Return the graphs of a stage's actions: those that a pass has rewritten, or else parts of the stage's graph."""
    return graph.actions or split_actions(graph)


def split_actions(graph: StepGraph) -> ActionGraphs:
    """Split the graph of a stage, after its passes have run.

    Args:
        graph: with shards, buffers, the stage's input, the positions of tokens where there are any, and the gradient of
            the output as inputs; and the output, the gradients of the shards of trained parameters, and that of the
            stage's input where it needs one as results.
    """
    nodes: list[fx.Node] = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
    inputs: list[fx.Node] = list(graph.graph.find_nodes(op="placeholder"))
    count = len(graph.parameters)
    begin = count + len(list(graph.model.buffers()))
    shards, buffers, (*arrived, gradient) = inputs[:count], inputs[count:begin], inputs[begin:]
    output, *gradients = graph.outputs()
    of_shards, of_arrived = gradients[: len(graph.trained)], gradients[len(graph.trained) :]

    gathered = _gathered(nodes, shards)
    resharded = _resharded(graph, gathered)
    forward, backward, reduction = _parts(nodes, gathered)
    reduced = [node for node in _read(reduction, of_shards) if node not in reduction]
    read = _read(backward, (*of_arrived, *reduced))
    staying = [node for node in forward if node in gathered and node not in resharded]
    kept = [node for node in staying if any(user not in gathered for user in node.users)]
    saved = [node for node in (*arrived, *forward) if node in read and node not in gathered]
    root, there = graph.module, (*shards, *buffers, *kept)
    taken = (*there, gradient, *saved)
    halves: dict[str, fx.GraphModule] = {}
    if graph.splits_backward:
        of_inputs = _needed(backward, of_arrived)
        of_weights = [node for node in backward if node not in of_inputs]
        read = _read(of_weights, reduced)
        left = [node for node in (gradient, *saved, *of_inputs) if node in read]
        halves["input_backward"] = _module(root, taken, of_inputs, (*of_arrived, *left))
        halves["weight_backward"] = _module(root, (*there, *left), of_weights, reduced, owned=reduced)
        halves["later_weight_backward"] = _module(root, (*there, *left), of_weights, (), added=reduced)
    else:
        halves["backward"] = _module(root, taken, backward, (*of_arrived, *reduced), owned=reduced)
        halves["later_backward"] = _module(root, taken, backward, of_arrived, added=reduced)
    return ActionGraphs(
        forward=_module(root, (*shards, *buffers, *arrived), forward, (output, *saved, *kept)),
        later_forward=_module(
            root,
            (*shards, *buffers, *arrived, *kept),
            [node for node in forward if node not in gathered or node in resharded],
            (output, *saved),
        ),
        **halves,
        reduction=_module(root, reduced, reduction, of_shards),
        kept=len(kept),
    )


def _parts(nodes: Iterable[fx.Node], gathered: Container[fx.Node]) -> tuple[dict[fx.Node, None], ...]:
    """Return the nodes of forward, of backward, and of the reduction; a node that reads a later part belongs to it."""
    forward, backward, reduction = dict[fx.Node, None](), dict[fx.Node, None](), dict[fx.Node, None]()
    for node in nodes:
        place = place_of(node)
        if place is None:  # a data-dependent number of rows
            assert not isinstance(node.meta.get("val"), torch.Tensor), f"{node} was traced"
            known = not any(source in backward or source in reduction for source in node.all_input_nodes)
            (forward if known else backward)[node] = None
        elif place.phase == "forward":
            forward[node] = None
        elif node not in gathered and (
            place.of_unit or place.of_pass or any(source in reduction for source in node.all_input_nodes)
        ):
            reduction[node] = None
        else:
            backward[node] = None
    return forward, backward, reduction


def _gathered(nodes: Iterable[fx.Node], shards: Iterable[fx.Node]) -> dict[fx.Node, frozenset[fx.Node]]:
    """Return the nodes that gather parameters, up to the gathered parameters, with the shards that they gather."""
    known = {shard: frozenset({shard}) for shard in shards}
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in nodes:
        sources, place = node.all_input_nodes, place_of(node)
        first = any(source in known for source in sources) or (place is not None and place.of_unit)
        if sources and first and all(source in known or source in found for source in sources):
            found[node] = frozenset().union(*(known.get(source) or found[source] for source in sources))
    return found


def _resharded(graph: StepGraph, gathered: Mapping[fx.Node, frozenset[fx.Node]]) -> set[fx.Node]:
    """Return the nodes that gather parameters of units that reshard after forward."""
    names = {name for unit in graph.units if unit.reshard_after_forward for name in unit.parameters}
    shards = {shard for name, shard in graph.inputs().items() if name in names}
    return {node for node, of in gathered.items() if of <= shards}


def _needed(nodes: Iterable[fx.Node], outputs: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """Return the nodes that outputs need, in order; for a node with several results, all of its items."""
    ordered = dict.fromkeys(nodes)
    found, left = set[fx.Node](), list(outputs)
    while left:
        node = left.pop()
        if node in ordered and node not in found:
            found.add(node)
            left += node.all_input_nodes
    found.update(node for node in ordered if is_part(node) and node.all_input_nodes[0] in found)
    return {node: None for node in ordered if node in found}


def _read(nodes: Iterable[fx.Node], outputs: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """Return the inputs of nodes, and the outputs."""
    return dict.fromkeys((*(source for node in nodes for source in node.all_input_nodes), *outputs))


def _module(
    root: fx.GraphModule,
    inputs: Iterable[fx.Node],
    nodes: Iterable[fx.Node],
    outputs: Sequence[fx.Node],
    *,
    owned: Container[fx.Node] = (),
    added: Sequence[fx.Node] = (),
) -> fx.GraphModule:
    """Return a part of a graph as a module.

    Args:
        root: of the whole graph.
        inputs: of the part.
        nodes: of the part, in order.
        outputs: of the part.
        owned: unsharded gradients, to which those of other micro batches are added in place, so that each needs a
            storage of its own.
        added: values that are added in place to further inputs as soon as they are available; a value that was cast for
            its sum is replaced by the value before the cast, which the sum accepts.
    """
    part, taken = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        copied = taken[node] = part.placeholder(node.name)
        copied.meta = dict(node.meta)
    sums = {node: part.placeholder(f"sum_{index}") for index, node in enumerate(added)}
    for taken_in in part.nodes:
        taken_in.target = taken_in.name  # which is unique: an operator's result can be called like a sum

    def add(node: fx.Node) -> None:
        sums[node].meta = {"val": node.meta["val"]}
        part.call_function(_ADD_IN_PLACE, (sums[node], taken[node])).meta = dict(node.meta)

    for node in added:
        if node in taken:
            add(node)
    for node in nodes:
        if node in sums and _is_cast_for_sum(node):
            taken[node] = taken[node.all_input_nodes[0]]
        else:
            taken[node] = part.node_copy(node, taken.__getitem__)
        if node in sums:
            add(node)
    bases = Counter(shown_by(node) for node in outputs)
    given = []
    for node in outputs:
        made = taken[node]
        if node in owned:
            storage = taken.get(shown_by(node), made)
            if storage.op == "placeholder" or bases[shown_by(node)] > 1 or not _owns(node):
                made = storage = part.call_function(_CLONE, (made,))
                made.meta = dict(node.meta)
            place = place_of(node)
            assert place is not None, "a gradient was computed"
            set_place(storage, place._replace(makes="unsharded_gradient"))
        given.append(made)
    part.output(given)
    part.lint()
    return fx.GraphModule(root, part)


def _is_cast_for_sum(node: fx.Node) -> bool:
    """Whether a gradient is cast to the dtype in which those of several micro batches are accumulated."""
    place = place_of(node)
    return place is not None and place.makes == "unsharded_gradient"


def _owns(node: fx.Node) -> bool:
    """Whether a value is the whole of a storage that was allocated for it."""
    value = node.meta["val"]
    whole: bool = value.untyped_storage().nbytes() == value.numel() * value.itemsize
    return whole and shown_by(node).op != "placeholder"
