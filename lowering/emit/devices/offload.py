"""`offload`: tensors in host memory."""

from __future__ import annotations

from typing import Final

from legoai.dsl.analysis.offload import offloads
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.lowering.emit.base import Draft, Lowering
from legoai.lowering.emit.code import Line, Node, call

_HOME = "legoai.runtime.offloading.offload"
_WHY: Final = "around the whole forward, after the hooks that gather parameters"


def emit(lowering: Lowering, draft: Draft) -> None:
    """Offload activations, and emit where parameters are created; `apply_fsdp` and `build_optimizer` do the rest."""
    offload = lowering.plan.offload
    if offload is None:
        return
    if offloads(lowering.analysis, "parameters"):
        draft.train_with("offload_parameters", "True", lowering.note(offload, "parameters"))
    if offloads(lowering.analysis, "activations") and not is_traced(lowering.analysis):
        draft.imports.name(_HOME, "offload_activations")
        draft.reasons["offload_activations"] = _WHY
        draft.parallelize.append(Line(call("offload_activations", "model"), "", lowering.note(offload, "activations")))


def policy_of_units(lowering: Lowering, draft: Draft) -> Line | None:
    """Return the line of the policy by which `fsdp` units keep their shards in host memory; None where they do not."""
    offload = lowering.plan.offload
    if offload is None or not offloads(lowering.analysis, "parameters"):
        return None
    draft.imports.name("torch.distributed.fsdp", "CPUOffloadPolicy")
    made = call("CPUOffloadPolicy", pin_memory='mesh.device_type != "cpu"')
    return Line(made, "offload = ", lowering.note(offload, "parameters"))


def with_state_on_host(lowering: Lowering, draft: Draft, optimizer: Node) -> Node:
    """Return the optimizer, with its state in host memory between steps where the plan states it."""
    # With the parameters in host memory, the optimizer keeps its state there by itself.
    # In a traced step, copies are nodes of its graph.
    if not offloads(lowering.analysis, "optimizer") or offloads(lowering.analysis, "parameters"):
        return optimizer
    if is_traced(lowering.analysis):
        return optimizer
    draft.imports.name(_HOME, "offload_optimizer_state")
    return call("offload_optimizer_state", optimizer)
