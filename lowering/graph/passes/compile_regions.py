"""Compilation of regions: the nodes of a compiled module between two collectives become one compiled function.

    mul, add, mm, gather 2, wait 1, mm, add       ->  region, gather 2, wait 1, region

A region is a run of consecutive nodes of one compiled module and one phase. Collectives and waits, and the nodes that
fill or split their buffers, stay where earlier passes have put them, so that no gathered buffer lives longer. Regions
with equal computation, such as those of equal blocks, are compiled once.

Computation of experts on a data-dependent number of rows runs operator by operator, as under the eager backend, where
the compiler is disabled for experts.

For a stage of a pipeline, the graphs of its actions are compiled: values that cross from one action to another end a
region.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx
from torch.fx.node import map_arg

from legoai.lowering.graph.step.places import Place, holds, place_of, set_place
from legoai.lowering.graph.step.regions import Compilation, Region, Source, compiled_modules_of
from legoai.lowering.graph.step.split import split_actions
from legoai.lowering.graph.step.step_graph import StepGraph
from legoai.lowering.graph.step.values import changes, shown_by, shows
from legoai.runtime.recomputation.policies import is_collective
from legoai.runtime.torch_internals.operators import OpOverload

_FEWEST: Final = 2
"""Fewest operators of a region that compute; a single one is a kernel already."""

_NODES: Final = "legoai_nodes"
"""The entry of `node.meta` of a call, with the names of its region's nodes."""
_RESULTS: Final = ("", "unsharded_gradient")
"""Kinds of results of a region."""

_UNKNOWN: Final = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


@dataclass(frozen=True, slots=True)
class _Compiled:
    """The compiled modules by their paths, and the modules within them that are not compiled."""

    how: Mapping[str, Compilation]
    apart: frozenset[str]


def compile_regions(graph: StepGraph) -> None:
    """Compile the regions of the modules that :func:`~legoai.lowering.graph.step.regions.compile_module` names."""
    modules = _Compiled(compiled_modules_of(graph.model), graph.reading)
    known: dict[Hashable, tuple[str, Region]] = {}
    for module in _modules(graph):
        _take_results_at_once(module.graph)
        _add_up_behind(module.graph, modules)
        found = _regions(module.graph, modules)
        for nodes in found:
            _show_outside(module.graph, nodes)
        for nodes in found:
            _compile(module, nodes, modules.how[_owner(nodes[0], modules)], known)
        for node in reversed(list(module.graph.nodes)):
            if not node.users and _is_view(node):
                module.graph.erase_node(node)
        module.graph.lint()
        module.recompile()


def _modules(graph: StepGraph) -> Iterator[fx.GraphModule]:
    """Yield the graphs that run."""
    if graph.is_stage:
        graph.actions = split_actions(graph)
        for _, module in graph.actions.modules():
            yield module
        return
    yield graph.module
    if graph.later is not None:
        yield graph.later


def nodes_of(call: fx.Node) -> tuple[str, ...]:
    """Return the original names of a region's nodes, given its call; empty for other nodes."""
    names: tuple[str, ...] = call.meta.get(_NODES, ())
    return names


def _take_results_at_once(graph: fx.Graph) -> None:
    """Move the items of each operator with several outputs directly after it.

    Copies to the host between them would end a region; regions take and return tensors, not tuples.
    """
    for node in list(graph.nodes):
        place = place_of(node)
        if place is None or not _computes(node, place) or shows(node) or node.target is operator.getitem:
            continue
        if isinstance(node.meta["val"], list | tuple):
            for user in reversed([user for user in node.users if user.target is operator.getitem]):
                node.append(user)


def _add_up_behind(graph: fx.Graph, modules: _Compiled) -> None:
    """Move additions to the graph's incoming sums after the run of nodes in which they would end a region.

    The added value is a result of the region, and lives until its end.
    """
    held: list[fx.Node] = []
    last: tuple[str, str] | None = None
    for node in list(graph.nodes):
        place = place_of(node)
        if place is not None and not node.users and [item.op for item in changes(node)] == ["placeholder"]:
            if last is not None:
                held.append(node)
            continue
        here = None if place is None else _key(node, place, modules)
        if here != last:
            for one in held:
                node.prepend(one)
            held.clear()
        last = here


def _key(node: fx.Node, place: Place, modules: _Compiled) -> tuple[str, str] | None:
    """Return the compiled module and the phase of the region to which a node can belong; None where it cannot."""
    owner = _owner(node, modules) if _computes(node, place) else None
    return None if owner is None else (owner, place.phase)


def _regions(graph: fx.Graph, modules: _Compiled) -> list[list[fx.Node]]:
    """Return the nodes of each region in their order."""
    apart: set[fx.Node] = set()
    while True:
        found = list(_runs(graph, modules, apart))
        more = set(_changed_elsewhere(graph, found)) - apart
        if not more:
            return [nodes for nodes in found if sum(not shows(node) for node in nodes) >= _FEWEST]
        apart |= more


def _runs(graph: fx.Graph, modules: _Compiled, apart: set[fx.Node]) -> Iterator[list[fx.Node]]:
    nodes: list[fx.Node] = []
    last: tuple[str, str] | None = None
    for node in graph.nodes:
        if node.op == "get_attr":  # a constant, which becomes an input of the region
            continue
        place = place_of(node)
        here = None if place is None or node in apart else _key(node, place, modules)
        if here != last and nodes:
            yield nodes
            nodes = []
        last = here
        if here is not None:
            nodes.append(node)
    if nodes:
        yield nodes


def _owner(node: fx.Node, modules: _Compiled) -> Any:
    place = place_of(node)
    assert place is not None, "a node that was traced"
    if any(holds(path, place.module) for path in modules.apart):
        return None
    return next((path for path in modules.how if holds(path, place.module)), None)


def _computes(node: fx.Node, place: Place) -> bool:
    """Whether a node is an operator on tensors of known shapes, and not part of a unit's communication."""
    target = node.target
    if place.makes not in _RESULTS or place.of_unit or node.op != "call_function":
        return False
    if isinstance(target, OpOverload):
        if (
            is_collective(target)
            or target.namespace in ("_c10d_functional", "bucketing")
            or _UNKNOWN & set(target.tags)
        ):
            return False
    elif target is not operator.getitem:
        return False
    return all(_is_known(item.meta.get("val")) for item in (node, *node.all_input_nodes))


def _is_known(value: Any) -> bool:
    """Whether a value consists of tensors of known shapes."""
    if isinstance(value, list | tuple):
        return all(map(_is_known, value))
    if value is None:
        return True
    return isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in (*value.shape, *value.stride()))


def _changed_elsewhere(graph: fx.Graph, found: Sequence[Sequence[fx.Node]]) -> Iterator[fx.Node]:
    """Yield nodes that change values of another region, or of none, in place; and the nodes that made such values."""
    region = {node: index for index, nodes in enumerate(found) for node in nodes}
    for node in graph.nodes:
        for value in changes(node):
            made = shown_by(value)
            if region.get(node) != region.get(made):
                yield from (node, made)


def _is_view(node: fx.Node) -> bool:
    """Whether a node is a view, and not an item of several outputs."""
    if node.target is operator.getitem:
        return _is_view(node.all_input_nodes[0])
    return shows(node)


def _show_outside(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Recompute views of a region's inputs and results outside it, so that they need not be results."""
    inside, copies = set(nodes), dict[fx.Node, fx.Node]()
    last = nodes[-1]

    def outside(node: fx.Node) -> fx.Node:
        nonlocal last
        if node not in inside or not _is_view(node):
            return node
        if node not in copies:
            sources = {source: outside(source) for source in node.all_input_nodes}
            with graph.inserting_after(last):
                last = copies[node] = graph.node_copy(node, sources.__getitem__)
        return copies[node]

    for node in nodes:
        if _is_view(node) and any(user not in inside for user in node.users):
            node.replace_all_uses_with(outside(node), delete_user_cb=lambda user: user not in inside)


def _compile(
    module: fx.GraphModule, nodes: Sequence[fx.Node], how: Compilation, known: dict[Hashable, tuple[str, Region]]
) -> None:
    """Replace nodes by a call of their region."""
    inside = set(nodes)
    results = [node for node in nodes if any(user not in inside for user in node.users)]
    given, source = _source(module, nodes, results, how)
    first = place_of(nodes[0])
    assert first is not None, "a node that was traced"
    if source.key not in known:
        name = f"{source.path.replace('.', '_') or 'root'}_{first.phase}"
        known[source.key] = _free_name(name, {of for of, _ in known.values()}), Region(source)
    name, region = known[source.key]
    module.add_submodule(name, region)
    graph = module.graph
    with graph.inserting_after(nodes[-1]):
        call = graph.call_module(name, tuple(given))
    call.meta["val"] = [node.meta["val"] for node in results]
    call.meta[_NODES] = tuple(node.name for node in nodes)
    set_place(call, Place(source.path, first.phase))
    last = call
    for index, node in enumerate(results):
        with graph.inserting_after(last):
            last = graph.call_function(operator.getitem, (call, index))
        last.meta = dict(node.meta)
        node.replace_all_uses_with(last, delete_user_cb=lambda user: user not in inside)
    for node in reversed(nodes):
        graph.erase_node(node)


def _free_name(name: str, taken: set[str]) -> str:
    return next(
        found for number in range(len(taken) + 1) if (found := f"{name}_{number}" if number else name) not in taken
    )


def _source(
    module: fx.GraphModule, nodes: Sequence[fx.Node], results: Sequence[fx.Node], how: Compilation
) -> tuple[list[fx.Node], Source]:
    """Return the inputs of a region, without views, and its computation.

    Its nodes are named by their operators only, so that equal regions compare equal.
    """
    inside, given, body = set(nodes), dict[fx.Node, None](), dict[fx.Node, None]()

    def take(node: fx.Node) -> None:
        if node not in inside and not _is_view(node):
            given[node] = None
        elif node not in body:
            for source in node.all_input_nodes:
                take(source)
            body[node] = None

    for node in nodes:
        take(node)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for index, node in enumerate(given):
        copies[node] = graph.placeholder(f"given_{index}")
    for node in body:
        arguments = map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = graph.create_node(node.op, node.target, *arguments)
    graph.output([copies[node] for node in results])
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
    places = [place for node in nodes if (place := place_of(node)) is not None]
    path = _common([place.module for place in places])
    tensors = tuple(node.meta["val"] for node in given)
    key = (
        how,
        graph.python_code("self").src,
        tuple(
            (tuple(item.shape), item.stride(), item.storage_offset(), item.dtype, str(item.device)) for item in tensors
        ),
        tuple(place.module[len(path) :] for place in places),
    )
    return list(given), Source(module=fx.GraphModule(module, graph), path=path, given=tensors, how=how, key=key)


def _common(paths: Sequence[str]) -> str:
    """Return the innermost module that contains all of some."""
    same: list[str] = []
    for parts in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        same.append(parts[0])
    return ".".join(same)
