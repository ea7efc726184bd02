"""Compiled regions of a step's graph on the simulated device, scheduled by inductor like compiled modules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from torch import fx

from legoai.cost.compilation.graphs import Graph, Options, Runner
from legoai.cost.compilation.schedule import MODULE
from legoai.cost.simulated.device import Kind
from legoai.cost.simulated.recorder import Capture
from legoai.lowering.graph.step import regions
from legoai.lowering.graph.step.places import place_of
from legoai.lowering.graph.step.regions import Source, fake_mode_of, functional
from legoai.runtime.torch_internals.compiler.graphs import TracingContext, disable_current_modes, tracing
from legoai.runtime.torch_internals.patching import patched_attribute
from legoai.specs.cluster import Device

_RUNNERS: Final[dict[Any, tuple[Graph, Runner]]] = {}
"""The compiled regions of this process, by what they compute and for which device."""


@contextlib.contextmanager
def compiled_regions(capture: Capture, kind: Kind, gpu: Device | None) -> Iterator[None]:
    """While entered, let compiled regions run as the kernels of their schedule.

    Args:
        capture: recorder of the rank.
        kind: of device, which decides the kernels.
        gpu: the plan's device, whose properties inductor needs.
    """

    def compiled(source: Source) -> Runner:
        key = kind, gpu, source.key
        if key not in _RUNNERS:
            graph = Graph(capture, kind, gpu, Options.of(source.how.backend, source.how.mode, kind))
            _RUNNERS[key] = graph, _compiled(graph, source)
        graph, runner = _RUNNERS[key]
        graph.capture = capture
        return runner

    with patched_attribute(regions, "compiled", compiled):
        yield


def _compiled(graph: Graph, source: Source) -> Runner:
    """Compile a region, without recording anything."""
    decompositions, once = {}, None
    if graph.options.inductor:
        from legoai.runtime.torch_internals.compiler.regions import fx_graph_cse, select_decomp_table

        decompositions, once = select_decomp_table(), fx_graph_cse
    mode, capture = fake_mode_of(source), graph.capture
    before, capture.paused = capture.paused, True
    try:
        with disable_current_modes(), tracing(TracingContext(mode)):
            module = functional(source, decompositions, once=once)
            _name_modules(module.graph, source.path)
            if graph.options.inductor:
                from legoai.cost.compilation.inductor import prepare

                with mode:
                    prepare(module, graph.kind, graph.gpu)
            return graph.compile(module, is_backward=False)
    finally:
        capture.paused = before


def _name_modules(graph: fx.Graph, path: str) -> None:
    """Set the module of each node, below the module of the region, for the scheduler."""
    for node in graph.nodes:
        place = place_of(node)
        if place is not None:
            below = place.module[len(path) :].removeprefix(".")
            node.meta["custom"] = {**node.meta["custom"], MODULE: below}
