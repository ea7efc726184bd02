"""Compiled graphs, cached for further simulations of a process."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from torch import nn

from legoai.cost.capture import capture
from legoai.cost.trace.records import Kernel
from legoai.specs.cluster import device
from support.simulation.simulated import in_a_fork
from support.texts.plans import lowered
from support.training import programs

PLAN = """\
plan tiny

model   gpt3("125m", dim = 64, n_heads = 4, n_layers = 2, vocab_size = 256)
cluster h100_sxm(devices = 1)
batch   (global = 4, micro = 2, seq_len = 64)
compile { layers.* = aot_eager }
"""


def _equal_captures() -> bool:
    program = lowered(PLAN)
    first, second = (capture(program, world=1, replay=False) for _ in range(2))
    return first == second


def test_cached_graph_holds_no_state_of_its_simulation():
    assert in_a_fork(_equal_captures)


def _kernels_with_dropout() -> Counter[tuple[str, str]]:
    def parallelize(model: nn.Module, mesh: object) -> nn.Module:
        for layer in model.layers.values():
            layer.feed_forward.w2 = nn.Sequential(layer.feed_forward.w2, nn.Dropout(0.1))
            layer.compile(backend="inductor", fullgraph=True, dynamic=False)
        return model

    trainer = dataclasses.replace(programs.trainer(global_batch=2), parallelize=parallelize)
    trace = capture(trainer, world=1, gpu=device("h100_sxm"), replay=False)
    step = trace.between(trace.steps[-1])
    return Counter((item.op, item.phase) for item in step if isinstance(item, Kernel))


@pytest.mark.slow
def test_dropout_seeds_are_drawn_once_per_compiled_forward():
    kernels = in_a_fork(_kernels_with_dropout)
    drawn = {phase: count for (op, phase), count in kernels.items() if op == "aten.randint"}
    assert drawn == {"forward": programs.LAYERS}
