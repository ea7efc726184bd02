"""Graphs of a program's step, as traced and after each pass."""

from __future__ import annotations

import torch.distributed as dist

from legoai.lowering.graph import rewritten
from legoai.lowering.graph.contracts import watched
from legoai.runtime.device import Device
from legoai.runtime.torch_internals.distributed.fake_world import FakeStore

BODY = """\
batch (global = 8, micro = 2, seq_len = 16)
mesh  (dp_shard = 2)
fsdp on dp_shard (backend = graph) { layers.* = unit }
comm  (reorder = true)
"""


def after_each_pass(text: str, picture, world: int = 2) -> dict[str, str]:
    """Output of a function for the graph of a program as traced, and after each of its passes."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        namespace: dict = {"__name__": "program"}
        exec(compile(text, "program.py", "exec"), namespace)
        passes, namespace["PASSES"] = namespace["PASSES"], ()
        training = namespace["trainer"]().prepare(Device(type="cpu"), seed=0)
        shown: dict[str, str] = {}
        with watched(lambda name, graph: shown.update({name: picture(graph)})):
            rewritten(training.step_graph, passes)
    finally:
        dist.destroy_process_group()
    return shown
