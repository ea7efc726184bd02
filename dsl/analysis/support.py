"""Support: one predicate per family for the configurations that lowering can turn into programs.

A predicate is in the module of its family's facts, and yields what the family does not support. Lint reports it,
lowering raises it, and emitters assume it. Configurations that have a lint rule of their own are not repeated here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from legoai.dsl.analysis import batch, model, offload
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.communication import comm
from legoai.dsl.analysis.computation import attention, checkpoint, precision
from legoai.dsl.analysis.parallelism import context, crossings, experts, float8, graph, overlap, shard
from legoai.dsl.analysis.training import loss, optimizer
from legoai.dsl.analysis.unsupported import Unsupported
from legoai.dsl.diagnostics.codes.lowering import NotLowered
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.specs.directives.hole import Undecided

FAMILIES: Final[dict[str, Callable[[Analysis], Iterator[Unsupported]]]] = {
    "model": model.supports,
    "batch": batch.supports,
    "pipeline": crossings.supports,
    "shard": shard.supports,
    "overlap": overlap.supports,
    "experts": experts.supports,
    "context": context.supports,
    "checkpoint": checkpoint.supports,
    "fsdp": graph.supports,
    "comm": comm.supports,
    "offload": offload.supports,
    "optimizer": optimizer.supports,
    "precision": precision.supports,
    "float8": float8.supports,
    "attention": attention.supports,
    "loss": loss.supports,
}
"""Keyword of a family to its predicate; `experts` is `shard` on `ep`, and `overlap` an option of its styles on `tp`."""


def unsupported(analysis: Analysis) -> Iterator[Diagnostic]:
    """Yield a diagnostic for each configuration that cannot be lowered.

    A predicate that needs an undecided value stops there, as checks do. One that needs the model yields nothing where
    it is not known.
    """
    for supports in FAMILIES.values():
        try:
            for item in supports(analysis):
                yield NotLowered.at(item.span, item.message, label=item.label, help=item.help)
        except Undecided:
            continue
