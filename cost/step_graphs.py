"""Text of the graphs of a lowered program's step, as traced and after each pass, obtained without a device."""

from __future__ import annotations

import itertools

from legoai.cost.capture import capture_piece
from legoai.cost.simulated.device import Kind
from legoai.cost.simulated.program import trainer_of
from legoai.lowering.graph.contracts import TRACE, watched
from legoai.lowering.graph.step.readable import readable, readable_module
from legoai.lowering.graph.step.split import actions_of
from legoai.lowering.graph.step.step_graph import StepGraph
from legoai.lowering.program import Program


def step_graphs(program: Program, *, world: int, kind: Kind) -> dict[str, str]:
    """Run a program of the graph backend on the simulated device, and return its graphs as readable Python.

    Args:
        program: as lowered.
        world: number of ranks for which it was lowered; the first is simulated.
        kind: of device, which decides the kernels.

    Returns:
        `trace`, and each pass by its name, in order. For a pipeline each of them for every stage of the rank, as
        `stage_0_trace`, followed by the graphs of the stages' actions.

    Raises:
        SimulationError: the program fails, or does something that cannot be recorded.
    """
    found: dict[str, str] = {}
    of_stages: dict[str, StepGraph] = {}
    pipeline = trainer_of(program).pipeline
    stages = None if pipeline is None else itertools.cycle(pipeline.stages_of_rank[0])

    def keep(name: str, graph: StepGraph) -> None:
        if stages is None:
            found.setdefault(name, readable(graph))
            return
        if name == TRACE:
            of_stages[f"stage_{next(stages)}"] = graph
        *_, stage = of_stages
        found.setdefault(f"{stage}_{name}", readable(graph))

    with watched(keep):
        capture_piece(program, world=world, kind=kind)
    for stage, graph in of_stages.items():
        for name, module in actions_of(graph).modules():
            found[f"{stage}_{name}"] = readable_module(module)
    return found
