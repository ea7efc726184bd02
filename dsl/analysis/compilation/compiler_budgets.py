"""Activation budgets that the compiler keeps: those of modules that are compiled themselves."""

from __future__ import annotations

from typing import Any

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.computation.checkpoint import recomputed_modules
from legoai.dsl.analysis.computation.compile import compiled_modules
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.checkpoint import Budget


@fact
def compiler_budgets(analysis: Analysis) -> dict[str, PathRule[Any]]:
    """Return the modules whose compiler chooses what they save, each with its rule of `checkpoint`.

    A step that is one graph chooses before it compiles.

    Raises:
        Undecided: a rule's treatment is a hole.
    """
    if is_traced(analysis):
        return {}
    compiled = compiled_modules(analysis)
    recomputed = recomputed_modules(analysis).items()
    return {path: rule for path, rule in recomputed if path in compiled and isinstance(rule.treatment, Budget)}


@fact
def checkpointed_modules(analysis: Analysis) -> dict[str, PathRule[Any]]:
    """Return the other modules that recompute: by a checkpoint, which calls their forward again.

    Raises:
        Undecided: a rule's treatment is a hole.
    """
    budgets = compiler_budgets(analysis)
    return {path: rule for path, rule in recomputed_modules(analysis).items() if path not in budgets}
