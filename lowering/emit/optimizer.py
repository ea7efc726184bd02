"""`optimizer`: the function that makes the optimizer."""

from __future__ import annotations

from legoai.dsl.analysis.replicate import replica_axes, replicas
from legoai.lowering.emit.base import Draft, Lowering
from legoai.lowering.emit.code import Function, Group, Item, Line, call, quoted
from legoai.lowering.emit.offload import with_state_on_host

_CLASSES = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}


def emit(lowering: Lowering, draft: Draft) -> None:
    """Add `build_optimizer`, with every constant written out."""
    optimizer = lowering.plan.optimizer
    algorithm = optimizer.algorithm
    values = {item.field: lowering.number(algorithm, item.field) for item in algorithm.options}
    if values.pop("fused") == "True":
        values["fused"] = "True"
    else:
        values["foreach"] = "True"
    draft.imports.module("torch")
    draft.imports.name("typing", "Any")
    made = _made(lowering, draft, f"torch.optim.{_CLASSES[algorithm.name]}", values)
    draft.later_functions.append(
        Function(
            "build_optimizer(parameters: list[dict[str, Any]]) -> torch.optim.Optimizer",
            (Line(with_state_on_host(lowering, draft, made), "return ", lowering.note(optimizer)),),
        )
    )
    draft.train_with("build_optimizer", "build_optimizer")


def _made(lowering: Lowering, draft: Draft, optimizer_class: str, values: dict[str, str]) -> Group:
    """The optimizer, with its state on every replica or cut over the replicas."""
    replicate = replicas(lowering.analysis)
    if replicate is None or replicate.optimizer == "replicated":
        return call(optimizer_class, "parameters", **values)
    draft.imports.name("legoai.runtime", "ShardedOptimizer")
    made = call("ShardedOptimizer", "parameters", optimizer_class, **values)
    axis = Item(quoted("_".join(replica_axes(lowering.analysis))), "axis=", lowering.note(replicate, "optimizer"))
    return Group(made.opening, (*made.items[:2], axis, *made.items[2:]), made.closing)
