"""Rules about parameters without dims, which cannot be cut."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.facts import listed
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check


class ScalarUnderFsdp(Check):
    """A parameter that is a single number without dims, under `fsdp` or `replicate`.

    Units shard every parameter along its first dim, and `fully_shard` refuses one that has none, such as the
    temperature of CLIP.

    Leave `fsdp` out on one device, or give the model a parameter of shape [1] in its place.
    """

    code = "LP519"
    slug = "scalar-under-fsdp"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan, manifest = analysis.plan, analysis.manifest
        use = plan.fsdp if plan.fsdp is not None else plan.replicate
        if use is None or manifest is None:
            return
        scalars = [path for path, shape in manifest.parameters() if shape == ()]
        if not scalars:
            return
        what = "are single numbers" if len(scalars) > 1 else "is a single number"
        yield self.at(
            analysis.span_of(use),
            f"{listed(scalars)} {what} without dims, which `{use.keyword}` cannot cut",
            label="every parameter is cut along its first dim",
            others=[Label(analysis.span_of(plan.model, "family"), "this model")],
            help=["give the model parameters of shape [1] in their place, or train on one device"],
        )
