"""Readable text of a step's graph: a line of Python for each node, grouped by module and phase."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from torch import fx

from legoai.lowering.graph.step.places import place_of
from legoai.lowering.graph.step.regions import Region
from legoai.lowering.graph.step.step_graph import StepGraph

_ASSIGNED: Final = re.compile(r"( +)(\w+)\b.* = ")
_NO_SOURCE: Final = re.compile(r"^ *# (Annotation: .*|No stacktrace found.*|File: .*)?$\n?", re.MULTILINE)
_RELEASED: Final = re.compile(r"; +\w+ = None(?=;|$)|(?:; +(?:\w+ = )+None)+", re.MULTILINE)


def readable(graph: StepGraph) -> str:
    """Return the graph as Python, with types and shapes of its values; the code that frees them is left out.

    If later micro batches of a step run another graph, that follows; then the graphs of regions, as they were before
    compilation.
    """
    if graph.later is None:
        return readable_module(graph.module)
    later = f"\n\n# micro batches behind the first of a step\n{readable_part(graph.later)}"
    return readable_part(graph.module) + later + _of_regions(graph.module, graph.later)


def readable_module(module: fx.GraphModule) -> str:
    """Return a graph as Python, followed by the graphs of its regions before compilation."""
    return readable_part(module) + _of_regions(module)


def _of_regions(*modules: fx.GraphModule) -> str:
    regions = {
        name: child for module in modules for name, child in module.named_children() if isinstance(child, Region)
    }
    return "".join(f"\n\n# {name}\n{readable_part(region.source.module)}" for name, region in regions.items())


def readable_part(module: fx.GraphModule) -> str:
    """Return one of a step's graphs as Python."""
    text = module.print_readable(print_output=False)
    text = _RELEASED.sub("", _NO_SOURCE.sub("", text))
    return "\n".join(_with_places(module.graph, text.splitlines())).strip("\n") + "\n"


def _with_places(graph: fx.Graph, lines: list[str]) -> Iterator[str]:
    places = {node.name: place_of(node) for node in graph.nodes}
    last = ""
    for line in lines:
        found = _ASSIGNED.match(line)
        place = None if found is None else places.get(found[2])
        if found is not None and place is not None and (here := f"{place.phase} of {place.module or 'root'}") != last:
            yield f"\n{found[1]}# {here}"
            last = here
        if line.strip():
            yield line
