"""Compiled modules whose graph breaks, and checkpoints in their graphs, which a break leaves uncompiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.compilation.compiled_checkpoints import checkpoints_in_graphs, compiled_after_checkpoint
from legoai.dsl.analysis.computation.compile import compiled_modules
from legoai.dsl.analysis.facts import below, holders, is_within
from legoai.dsl.analysis.parallelism.experts import changed_experts
from legoai.dsl.analysis.parallelism.fsdp import fsdp_units
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.parallelism.replicate import gradient_buckets
from legoai.specs.directives.base import PathRule
from legoai.specs.span import Span


@dataclass(frozen=True, slots=True)
class BrokenCheckpoint:
    """A checkpoint in the graph of a compiled module, which has a break inside of the checkpoint.

    Attributes:
        rule: of `compile`.
        inside: path of the module at which the graph breaks.
    """

    rule: PathRule[Any]
    inside: str


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
    for path, rule in effectively_compiled(analysis).items():
        inside = [other for other in breaks if is_within(other, path)]
        inside += [other for other in units if below(other, path)]
        if inside and not rule.treatment.fullgraph:
            return path, inside[0]
    return None


@fact
def broken_checkpoints(analysis: Analysis) -> dict[str, BrokenCheckpoint]:
    """Return the checkpointed modules in compiled graphs within which the graph breaks, by path.

    `fullgraph = true` is refused there. With `fullgraph = false` nothing of the checkpoint is compiled:
    `torch.utils.checkpoint` is traced as a whole or not at all, and where it is not, it disables the compiler for all
    that it calls (PyTorch 2.13). A checkpoint around a compiled module disables nothing, since that enables the
    compiler again.

    Raises:
        Undecided: a rule's treatment is a hole.
    """
    found: dict[str, BrokenCheckpoint] = {}
    traced = checkpoints_in_graphs(analysis)
    if not traced:
        return found
    compiled, after = compiled_modules(analysis), compiled_after_checkpoint(analysis)
    for path, rule in traced.items():
        inside = break_inside(analysis, path)
        # A module that is compiled and then checkpointed is compiled inside of its checkpoint.
        if inside is not None and (path in after or path not in compiled):
            found[path] = BrokenCheckpoint(rule, inside)
    return found


@fact
def effectively_compiled(analysis: Analysis) -> dict[str, PathRule[Any]]:
    """Return the compiled modules without those of which nothing would be compiled, each with its rule.

    Raises:
        Undecided: a rule's treatment is a hole.
    """
    after, broken = compiled_after_checkpoint(analysis), broken_checkpoints(analysis)
    return {
        path: rule
        for path, rule in compiled_modules(analysis).items()
        if path not in after or path not in broken or rule.treatment.fullgraph
    }


def break_inside(analysis: Analysis, path: str) -> str | None:
    """Return the first module at which a graph of a module would break; None without a known break.

    Raises:
        Undecided: a rule's treatment is a hole.
    """
    assert analysis.manifest is not None, "a model that can be inspected"
    module = analysis.manifest.modules[path]
    assigning = module.child_path(module.assigned[0]).rpartition(".")[0] if module.assigned else None
    return _breaks(analysis).get(path, assigning)


@fact
def _breaks(analysis: Analysis) -> dict[str, str]:
    """Return the first module at which a graph breaks, by the path of each that holds it."""
    manifest = analysis.manifest
    assert manifest is not None, "a model that can be inspected"
    own = [*changed_experts(analysis), *(path for path, info in manifest.modules.items() if info.backward_hooks)]
    if manifest.graph_break is not None:
        own.append(manifest.graph_break[0])
    found: dict[str, str] = {}
    for path in own:
        for above in (path, *holders(path)):
            found.setdefault(above, path)
    for path in hooked_modules(analysis):
        for above in holders(path):
            found.setdefault(above, path)
    return found
