"""Check: a lint rule that looks at the resolved plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.diagnostics.rule import Rule

if TYPE_CHECKING:
    from legoai.dsl.analysis.analysis import Analysis


class Check(Rule):
    """A rule that looks at the resolved plan."""

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        """Every diagnostic. A check that meets an undecided value stops there: see ``legoai.specs.directives.hole``."""
        raise AssertionError(f"{type(self).__name__} checks nothing")
