"""`pipeline`: rules about cutting models that others wrote."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.facts import written
from legoai.dsl.analysis.stages import stage_count
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check


class CannotCut(Check):
    """A pipeline of a model from a factory or a Hugging Face config that cannot be cut where the plan says.

    Each stage runs the forward of the whole model, with stand-ins for the modules of other stages. So exactly one
    tensor may cross each cut, straight from one module into another, and nothing else that a stage computes may need
    tokens or weights that lie elsewhere. Modules without weights that look at no token, such as rotary embeddings, are
    on every stage. A parameter of the model itself, outside of its modules, would be on every stage too, and is
    refused.
    """

    code = "LP518"
    slug = "cannot-cut"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        from legoai.dsl.analysis.chain import CannotFollow, Chain
        from legoai.dsl.analysis.split_points import SplitPoints
        from legoai.specs.directives.model import FOREIGN

        plan, manifest = analysis.plan, analysis.manifest
        pipeline = plan.pipeline
        if pipeline is None or manifest is None or plan.model.family not in FOREIGN or plan.mesh.pp == 1:
            return
        stages, known = stage_count(analysis, pipeline), SplitPoints(manifest)
        if stages is None or stages % plan.mesh.pp:
            return
        if isinstance(pipeline.split, str):
            if stages > len(known.blocks):
                return
        else:
            places = [known.position.get(path, 0) for path in pipeline.split]
            if len(places) != stages - 1 or 0 in places or places != sorted(set(places)):
                return
        try:
            chain = Chain(manifest)
            cuts = list(chain.cuts(chain.stages(pipeline.split, stages)))
            chain.width(cuts)
        except CannotFollow as error:
            yield self.at(
                analysis.place(pipeline, "split" if written(pipeline, "split") else "keyword"),
                f"this model cannot be cut into {stages} stages: {error}",
                label="cannot be cut like this",
                others=[Label(analysis.place(plan.model, "family"), "the model")],
                help=["split where one block hands one tensor to the next, or train it without a pipeline"],
            )
