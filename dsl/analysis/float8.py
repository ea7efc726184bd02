"""Linear layers that compute in float8 or mxfp8."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.fact import fact
from legoai.dsl.analysis.facts import following, grouped
from legoai.dsl.analysis.unsupported import Unsupported
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.precision import Float8, MxFp8


@fact
def converted_layers(analysis: Analysis) -> dict[str, PathRule[Any]]:
    """The linear layers that rules of `precision` convert, with their rules; other modules have nothing to convert.

    Raises:
        Undecided: a rule's treatment is a hole.
    """
    manifest = analysis.manifest
    if manifest is None:
        return {}
    matched = following(analysis, analysis.plan.precision, (Float8, MxFp8))
    return {path: rule for path, rule in matched.items() if manifest.modules[path].kind == "linear"}


def supports(analysis: Analysis) -> Iterator[Unsupported]:
    """Float8."""
    for rule, _ in grouped(converted_layers(analysis).items()):
        if isinstance(rule.treatment, MxFp8):
            yield Unsupported(
                analysis.rule_span(rule), "`mxfp8` is not lowered yet: torchao has no stable way to train in it"
            )
