"""Kinds of parameters that the optimizer updates."""

from __future__ import annotations

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.replicate import replicas
from legoai.dsl.analysis.shard import DISTRIBUTING, tensor_parallel
from legoai.specs.directives.base import Directive


def distributing_statement(analysis: Analysis) -> Directive | None:
    """The statement that makes DTensors of parameters; None where all of them are plain tensors.

    Raises:
        Undecided: the size of `tp` or a treatment on it is a hole.
    """
    plan = analysis.plan
    if plan.fsdp is not None:
        return plan.fsdp
    replicate = replicas(analysis)
    if replicate is not None:
        return replicate
    laid = tensor_parallel(analysis)
    placed = laid.placements or any(isinstance(rule.treatment, DISTRIBUTING) for rule in laid.styles.values())
    return plan.shard_on("tp") if placed else None
