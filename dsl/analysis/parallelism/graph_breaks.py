"""Compiled modules whose graph breaks at units or distributed experts."""

from __future__ import annotations

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.computation.compile import compiled_modules
from legoai.dsl.analysis.facts import below, is_within
from legoai.dsl.analysis.parallelism.experts import changed_experts
from legoai.dsl.analysis.parallelism.fsdp import fsdp_units
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.parallelism.replicate import gradient_buckets
from legoai.specs.span import Span


def hooked_modules(analysis: Analysis) -> dict[str, Span | None]:
    """Modules below the model whose hooks break graphs, by path, each with the place that makes it one.

    These are units of `fsdp`, and modules whose gradients `replicate` reduces in a bucket of their own.

    Raises:
        Undecided: a rule's treatment is a hole.
    """
    if is_traced(analysis):
        return {}
    units = {path: unit.rule.origin.span for path, unit in fsdp_units(analysis).items() if unit.rule is not None}
    buckets = () if analysis.manifest is None else gradient_buckets(analysis)
    return units | {path: bucket.span for bucket in buckets for path in bucket.paths}


def first_graph_break(analysis: Analysis) -> tuple[str, str] | None:
    """Return the first compiled module whose graph breaks, and the experts or the unit where; None without any.

    :func:`legoai.cost.compilation.modules.has_graph_break` finds the same in a program.

    Raises:
        Undecided: a rule's treatment is a hole.
    """
    if analysis.plan.compile is None or is_traced(analysis):
        return None
    breaks, units = changed_experts(analysis), hooked_modules(analysis)
    for path, rule in compiled_modules(analysis).items():
        inside = [other for other in breaks if is_within(other, path)]
        inside += [other for other in units if below(other, path)]
        if inside and not rule.treatment.fullgraph:
            return path, inside[0]
    return None
