"""All-gathers and reductions of a step's graph: their nodes, and the parameters that they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from legoai.lowering.graph.step.operators import CLONE, GATHERS, PAD, SCATTERS, SUM_OVER_REPLICAS, WAIT
from legoai.lowering.graph.step.places import place_of
from legoai.lowering.graph.step.step_graph import StepGraph
from legoai.lowering.graph.step.values import shows
from legoai.runtime.torch_internals.compiler.graph_passes import CAST


@dataclass(frozen=True, slots=True)
class Unshard:
    """The all-gather of a parameter.

    Attributes:
        parameter: its name.
        chain: the nodes from the cast of the shard, if there is one, to the wait.
    """

    parameter: str
    chain: tuple[fx.Node, ...]

    @property
    def gather(self) -> fx.Node:
        """The collective."""
        return self.chain[-2]

    @property
    def wait(self) -> fx.Node:
        """The node whose value is the gathered parameter."""
        return self.chain[-1]


def unshards(graph: StepGraph) -> Iterator[Unshard]:
    """Yield the all-gathers of single parameters in graph order, including those over a part of the ranks."""
    parameters = {node: name for name, node in graph.inputs().items()}
    gathered: dict[fx.Node, str] = {}
    for node in graph.graph.nodes:
        if node.target is not WAIT or node.args[0].target not in GATHERS or not graph.of_unit(node.args[0]):
            continue
        chain = [node, node.args[0]]
        while (source := chain[-1].args[0]) not in parameters and source.target is CAST:
            chain.append(source)
        if source.target is CLONE and (whole := source.args[0].args[0]) in gathered:
            yield Unshard(gathered[whole], tuple(reversed(chain)))
        elif source in parameters:
            gathered[node] = parameters[source]
            yield Unshard(parameters[source], tuple(reversed(chain)))


def reduction_of(gradient: fx.Node) -> tuple[fx.Node, ...] | None:
    """Return the nodes of a gradient's reduction, from cast and padding to the shard; None where there is none."""
    chain = [gradient]
    while chain[-1].target not in SCATTERS:
        node = chain[-1]
        if (
            node.op != "call_function"
            or len(node.all_input_nodes) != 1
            or not (node.target in (WAIT, CAST, SUM_OVER_REPLICAS) or shows(node))
        ):
            return None
        chain.append(node.all_input_nodes[0])
    for kind in (PAD, CAST):
        source = chain[-1].all_input_nodes[0]
        if source.target is kind and (kind is CAST or is_padding(source)):
            chain.append(source)
    return tuple(reversed(chain))


def is_padding(node: fx.Node) -> bool:
    """Whether a node pads a gradient for its reduction."""
    place = place_of(node)
    return node.target is PAD and place is not None and place.of_unit


def in_order(graph: StepGraph) -> dict[fx.Node, int]:
    """Return the index of each node in the graph."""
    return {node: index for index, node in enumerate(graph.graph.nodes)}
