"""Support: the lint rule for what this version turns into no program."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.support import unsupported
from legoai.dsl.diagnostics.codes.lowering import NotLowered
from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.rules.base import Check


class IsLowered(NotLowered, Check):
    """Every family supports what the plan says of it (see ``not-lowered``)."""

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        yield from unsupported(analysis)
