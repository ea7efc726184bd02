"""`shard on ep`: rules about experts beside other statements."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.experts import changed_experts
from legoai.dsl.analysis.facts import below, following, name_of
from legoai.dsl.analysis.graph import is_traced
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.specs.directives.compile import AotEager, Inductor


class ExpertsInOneGraph(Check):
    """One graph of a module whose experts take a number of tokens that differs from call to call.

    Experts on several ranks, and experts with a capacity, wait for the numbers of tokens that arrive or that are kept.
    A compiled module breaks its graph there, which `fullgraph = true`, the default, does not allow. Under
    `backend = graph` it needs no break: what such experts compute runs operator by operator, and all around it is
    compiled.

    ## Example
    ```
    model   mixtral("8x7b")
    mesh    (dp_shard = 32, ep = 4)
    shard on ep { layers.*.feed_forward.experts = experts }
    compile { layers.* = inductor }
    ```

    ## Use instead
    ```
    model   mixtral("8x7b")
    mesh    (dp_shard = 32, ep = 4)
    shard on ep { layers.*.feed_forward.experts = experts }
    compile { layers.* = inductor(fullgraph = false) }
    ```
    """

    code = "LP630"
    slug = "experts-in-one-graph"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        found = changed_experts(analysis)
        if not found or is_traced(analysis):
            return
        for path, rule in following(analysis, analysis.plan.compile, (Inductor, AotEager)).items():
            inside = next((item for item in found if item == path or below(item, path)), None)
            if inside is None or not rule.treatment.fullgraph:
                continue
            yield self.at(
                rule.treatment.origin("fullgraph").span or analysis.rule_span(rule),
                f"`{name_of(path)}` cannot be one graph: how many tokens `{inside}` takes differs from call to call",
                label="one graph",
                others=[Label(analysis.rule_span(found[inside]), "these experts")],
                help=["write `fullgraph = false`"],
            )
            return
