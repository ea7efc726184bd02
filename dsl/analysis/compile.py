"""Modules that torch.compile compiles, and those whose operators a compiled module hides."""

from __future__ import annotations

from typing import Any

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.fact import fact
from legoai.dsl.analysis.facts import following
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.compile import AotEager, Inductor


@fact
def compiled_modules(analysis: Analysis) -> dict[str, PathRule[Any]]:
    """The modules that are compiled, in the model's order, each with its rule.

    Raises:
        Undecided: a rule's treatment is a hole.
    """
    return following(analysis, analysis.plan.compile, (Inductor, AotEager))
