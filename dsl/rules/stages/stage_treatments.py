"""`stages([…])`: rules about treatments that differ from stage to stage."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.facts import listed
from legoai.dsl.analysis.stages.pipeline import is_staged, stage_count, stage_of
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.frontend.paths import pattern
from legoai.dsl.rules.base import Check
from legoai.specs.directives.base import PathRule, Staged


class TreatmentsOfStages(Check):
    """Treatments per stage that do not match the plan's pipeline.

    `stages` takes one treatment for each stage, for modules inside a stage. A pipeline has one stage on each rank of
    `pp`, or as many as its schedule and `stages` determine.

    ## Example
    ```
    mesh (pp = 4, dp_shard = 8)
    pipeline on pp
    checkpoint { layers.* = stages([full, none]) }
    ```

    ## Use instead
    ```
    mesh (pp = 4, dp_shard = 8)
    pipeline on pp
    checkpoint { layers.* = stages([full, full, none, none]) }
    ```
    """

    code = "LP521"
    slug = "treatments-of-stages"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        for directive in analysis.plan.directives():
            for rule in directive.rules:
                if isinstance(rule.treatment, Staged):
                    yield from self._check(analysis, rule)

    def _check(self, analysis: Analysis, rule: PathRule[Staged]) -> Iterator[Diagnostic]:
        pipeline, treatment = analysis.plan.pipeline, rule.treatment
        place = analysis.span_of(treatment, "each")
        if pipeline is None or not is_staged(analysis):
            yield self.at(
                place, "the plan has no stages to tell apart", label="no pipeline",
                others=[] if pipeline is None else [Label(analysis.span_of(analysis.plan.mesh, "pp"), "one rank")],
                help=["write one treatment, or `first(…)`"],
            )  # fmt: skip
            return
        count, given = stage_count(analysis), len(treatment.each)
        if count is not None and given != count:
            yield self.at(
                place,
                f"{given} {'treatment' if given == 1 else 'treatments'} for {count} stages",
                label=f"not {count}",
                others=[Label(analysis.span_of(pipeline), f"{count} stages")],
                help=[f"give {count}, in the model's order"],
            )
        if analysis.manifest is None:
            return
        matched = analysis.module_paths.matching(pattern(rule.path))
        outside = [path or "root" for path in matched if stage_of(analysis, path) is None]
        if outside:
            yield self.at(
                analysis.rule_span(rule),
                f"no stage holds {listed(outside)}",
                label="lies in no stage",
                help=["name modules of the model's blocks, or before or behind them"],
            )
