"""Graphs of a lowered program's step, as it was traced and after each pass: its text, without a device."""

from __future__ import annotations

from legoai.cost.capture import capture_piece
from legoai.cost.simulated.device import Kind
from legoai.lowering.graph.passes import watched
from legoai.lowering.graph.readable import readable
from legoai.lowering.graph.step_graph import StepGraph
from legoai.lowering.program import Program


def step_graphs(program: Program, *, world: int, kind: Kind) -> dict[str, str]:
    """Take a program of the graph backend on the simulated device, and return its graphs as readable Python.

    Args:
        program: as lowered.
        world: number of ranks for which it was lowered; the first is taken.
        kind: whose kernels the device has.

    Returns:
        `trace`, and each pass by its name, in their order.

    Raises:
        SimulationError: the program fails, or does what cannot be recorded.
    """
    found: dict[str, str] = {}

    def keep(name: str, graph: StepGraph) -> None:
        found.setdefault(name, readable(graph))

    with watched(keep):
        capture_piece(program, world=world, kind=kind)
    return found
