"""Saved activations in the graph of a step: the outputs that the eager backend saves."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from legoai.cost.capture import capture
from legoai.cost.memory.storages import memory
from legoai.cost.trace.records import Collective, Kernel
from legoai.lowering.graph.passes.activations import ChangedInPlaceError, is_recomputed, keep_activations
from legoai.lowering.graph.step.checkpointed import KeptOutputs
from legoai.lowering.graph.step.places import Places
from legoai.lowering.graph.step.step_graph import StepGraph
from legoai.runtime.recomputation import budget as recompute_budget
from legoai.runtime.recomputation.policies import keep_outputs, traced_by
from legoai.runtime.torch_internals.compiler.graph_passes import make_fx
from support.simulation.simulator import in_the_simulator
from support.texts.plans import HEAD, SEQUENCE_PARALLEL, lowered

BODY = f"""\
batch (global = 8, micro = 2, seq_len = 256)
mesh  (dp_shard = 2, tp = 2)
{SEQUENCE_PARALLEL}
fsdp on dp_shard (backend = eager) {{ layers.* = unit }}
checkpoint {{
  layers.0              = selective([attention, alternate_matmul])
  layers.1              = budget(50%)
  layers.2              = selective([collective, matmul])
  layers.3.feed_forward = budget(1MiB, by = knapsack)
}}
"""
WQ = "layers.0.attention.wq"
PRODUCTS = ("aten.mm", "aten._scaled_dot_product_flash_attention_for_cpu")


def simulated(text: str) -> tuple[Counter, int, list[list[tuple[str, int]]]]:
    """Counts of products, and of collectives of `tp` outside of backward, by phase and module.

    Also the peak, and the operators chosen within budgets.
    """
    chosen: list[list[tuple[str, int]]] = []

    class Watched(recompute_budget.RecomputeWithin):
        def _choose(self, measured: recompute_budget.ForwardMeasurement) -> frozenset[recompute_budget.Call]:
            kept = super()._choose(measured)
            chosen.append(sorted((str(operator), call) for operator, call in kept))
            return kept

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("legoai.runtime.RecomputeWithin", Watched)
        trace = capture(text, world=4, kind="cpu", replay=False)
    found: Counter[tuple[str, str, str]] = Counter()
    for item in trace.records[trace.steps[-1].start : trace.steps[-1].stop]:
        if isinstance(item, Kernel) and item.op in PRODUCTS:
            found[item.op, item.phase, item.module] += 1
        elif isinstance(item, Collective) and item.axis == "tp" and item.phase != "backward":
            found[item.kind, item.phase, item.module] += 1
    return found, memory(trace).peak, chosen


@pytest.mark.slow
def test_operators_saved_by_the_eager_backend_are_saved():
    eager, eager_peak, eager_choice = in_the_simulator(simulated, lowered(HEAD + BODY).text)
    graph, peak, choice = in_the_simulator(simulated, lowered(HEAD + BODY.replace("eager", "graph")).text)
    assert choice == eager_choice and len(choice) == 2 and all(choice)
    # The eager backend also computes again what only kept outputs are computed of.
    assert eager - graph == Counter({("aten.mm", "recompute", "layers.1.attention.wo"): 2})
    assert not graph - eager
    assert graph["aten.mm", "recompute", "layers.0.attention.wk"] and not graph["aten.mm", "recompute", WQ]
    assert eager_peak * 0.85 < peak < eager_peak


class Products(nn.Module):
    """Two products, of which the first may be changed in place."""

    def __init__(self, *, changes: bool) -> None:
        super().__init__()
        self.changes = changes

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        first = x @ weight
        if self.changes:
            first.view(-1).add_(1)
        return (first.sin() @ weight).sin()


def traced(model: nn.Module, *given: torch.Tensor) -> StepGraph:
    """Forward and backward of a checkpointed module that keeps its products."""

    def step(*values: torch.Tensor) -> list[torch.Tensor]:
        with Places(model).followed():
            made = checkpoint(model, *values, use_reentrant=False, context_fn=keep_outputs("aten.mm"))
            return [made.sum(), *torch.autograd.grad(made.sum(), values)]

    with traced_by(KeptOutputs()), torch.autograd.set_multithreading_enabled(False):
        return StepGraph(model, make_fx(step)(*given), parameters=(), units=())


def recomputed(graph: StepGraph) -> set[str]:
    return {node.target.__name__ for node in graph.graph.nodes if is_recomputed(node)} - {"detach.default"}


def test_backward_reads_saved_outputs_without_dead_recomputation():
    given = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    graph = traced(Products(changes=False), *given)
    before = graph.module(*given)
    assert recomputed(graph) == {"mm.default", "sin.default"}
    keep_activations(graph)
    graph.graph.lint()
    graph.module.recompile()
    assert recomputed(graph) == {"sin.default"}
    assert all(torch.equal(one, other) for one, other in zip(before, graph.module(*given), strict=True))


def test_tensors_changed_in_place_are_not_saved():
    given = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
    with pytest.raises(ChangedInPlaceError, match="in place, which is kept"):
        keep_activations(traced(Products(changes=True), *given))
