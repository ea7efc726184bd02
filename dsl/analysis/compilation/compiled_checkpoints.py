"""Checkpoints that lie inside the graphs of compiled modules."""

from __future__ import annotations

from typing import Any

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.compilation.compiler_budgets import checkpointed_modules
from legoai.dsl.analysis.computation.compile import compiled_modules
from legoai.dsl.analysis.facts import holders
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.checkpoint import Selective


@fact
def compiled_after_checkpoint(analysis: Analysis) -> dict[str, PathRule[Any]]:
    """Return the compiled modules whose own checkpoint is compiled with them, each with its rule of `compile`.

    These are the modules with a list of what is saved: the list is about operators, which a compiled module no longer
    has.

    Raises:
        Undecided: a rule's treatment is a hole.
    """
    checkpointed = checkpointed_modules(analysis)
    return {
        path: rule
        for path, rule in compiled_modules(analysis).items()
        if path in checkpointed and isinstance(checkpointed[path].treatment, Selective)
    }


@fact
def checkpoints_in_graphs(analysis: Analysis) -> dict[str, PathRule[Any]]:
    """Return the checkpointed modules whose checkpoint is traced, each with the rule that compiles it.

    Raises:
        Undecided: a rule's treatment is a hole.
    """
    if is_traced(analysis):
        return {}
    compiled, after = compiled_modules(analysis), compiled_after_checkpoint(analysis)
    found = {}
    for path in checkpointed_modules(analysis):
        rule = next((compiled[above] for above in reversed(holders(path)) if above in compiled), after.get(path))
        if rule is not None:
            found[path] = rule
    return found
