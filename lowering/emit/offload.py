"""`offload`: what does the program keep in host memory?"""

from __future__ import annotations

from legoai.lowering.emit.base import Draft, Lowering, written
from legoai.lowering.emit.code import Line, Node, call
from legoai.specs.directives.offload import Offload

_FIELDS = ("optimizer", "parameters", "activations")
_HOME = "legoai.runtime.offload"


def emit(lowering: Lowering, draft: Draft) -> None:
    """Offload activations, and say where parameters are made; the rest is for `apply_fsdp` and `build_optimizer`."""
    offload = lowering.plan.offload
    if offload is None:
        return
    _refuse_amounts(lowering, offload)
    if offload.parameters == "all":
        _check_parameters(lowering, offload)
        draft.train_with("offload_parameters", "True", lowering.note(offload, "parameters"))
    if offload.activations == "all":
        draft.imports.name(_HOME, "offload_activations")
        draft.parallelize.append(Line(call("offload_activations", "model"), "", lowering.note(offload, "activations")))


def _refuse_amounts(lowering: Lowering, offload: Offload) -> None:
    for field in _FIELDS:
        amount = getattr(offload, field)
        if amount not in ("none", "all"):
            lowering.refuse(
                lowering.place(offload, field),
                f"`{field} = {written(amount)}` of `offload` is not lowered: it places copies between the operations "
                "of one traced graph, which the eager backend does not have",
                label="not in this program",
                help=["write `all` or `none`"],
            )


def _check_parameters(lowering: Lowering, offload: Offload) -> None:
    if lowering.plan.fsdp is None:
        lowering.refuse(
            lowering.place(offload, "parameters"),
            "`parameters = all` needs an `fsdp` statement, whose units bring them back",
            label="no unit brings them back",
        )
    if offload.optimizer == "none" and offload.origin("optimizer").decider != "default":
        lowering.refuse(
            lowering.place(offload, "optimizer"),
            "the optimizer updates parameters where they are, and its state is there too",
            label="cannot be on the device",
            help=["leave `optimizer` out, or write `all`"],
        )


def policy_of_units(lowering: Lowering, draft: Draft) -> Line | None:
    """The line that says how the units of `fsdp` keep their shards in host memory; None where they do not."""
    offload = lowering.plan.offload
    if offload is None or offload.parameters != "all":
        return None
    draft.imports.name("torch.distributed.fsdp", "CPUOffloadPolicy")
    made = call("CPUOffloadPolicy", pin_memory='mesh.device_type != "cpu"')
    return Line(made, "offload = ", lowering.note(offload, "parameters"))


def with_state_on_host(lowering: Lowering, draft: Draft, optimizer: Node) -> Node:
    """The optimizer, with its state in host memory between steps where the plan says so."""
    offload = lowering.plan.offload
    if offload is None or offload.optimizer != "all" or offload.parameters == "all":
        return optimizer
    draft.imports.name(_HOME, "offload_optimizer_state")
    return call("offload_optimizer_state", optimizer)
