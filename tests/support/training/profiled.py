"""Training of programs whose first steps measure a profile, with measurements that the test provides."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch.distributed as dist

from legoai.lowering.graph.measurement.nodes import NodeWatch, Sample
from legoai.lowering.graph.measurement.rounds import outline
from legoai.runtime import RunOptions
from legoai.runtime.training.loop import TrainingLoop
from legoai.runtime.training.state import Training


def train_measured(text: str, data: str, cache: str, *, steps: int, beyond: int) -> dict[str, Any]:
    """Run a program with a cache of its own, on ranks of which the last holds most bytes beyond those of its values.

    Returns:
        Losses and local parameters; what the graph does and the order of its nodes before and behind the run; and the
        events that were told.
    """
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile(text, "program.py", "exec"), namespace)
    graphs: list[tuple[dict[str, int], list[str]]] = []
    events: list[dict[str, Any]] = []
    live, last = NodeWatch._live_bytes, dist.get_rank() + 1 == dist.get_world_size()

    def note(training: Training) -> None:
        graph: Any = training.graph
        graphs.append((outline(graph), [node.name for node in graph.graph.nodes]))

    def record(_: TrainingLoop, __: Any, notices: Any) -> None:
        events.extend(notice.values for notice in notices)

    def milliseconds(_: NodeWatch, sample: Sample) -> float:
        return len(sample.name) / (3.0 if last else 7.0)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"XDG_CACHE_HOME": cache}))
        stack.enter_context(mock.patch.object(NodeWatch, "_milliseconds", milliseconds))
        stack.enter_context(
            mock.patch.object(NodeWatch, "_live_bytes", lambda *given: live(*given) + (beyond if last else 0))
        )
        stack.enter_context(mock.patch.object(TrainingLoop, "_report", record))
        options = RunOptions(device="cpu", log_every=0, steps=steps, data=data)
        history = namespace["trainer"]().fit(options, prepared=note)
        note(history.training)
    return {
        "loss": [record.loss for record in history.steps],
        "parameters": [parameter.to_local().detach().clone() for parameter in history.training.model.parameters()],
        "graphs": graphs,
        "events": events,
    }
