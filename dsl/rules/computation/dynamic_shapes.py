"""`compile`: shapes that vary, in modules whose tensors tensor parallelism distributes."""

from __future__ import annotations

from collections.abc import Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.computation.compile import compiled_modules
from legoai.dsl.analysis.facts import below, grouped, name_of, replacement
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.specs.directives.compile import Inductor


class DynamicShapesOfShards(Check):
    """Modules compiled for shapes that vary, with layers that tensor parallelism shards.

    Tensor parallelism makes DTensors of weights and activations. For the backward pass of their views, PyTorch 2.13
    computes symbolic sizes from each other without end, and compilation fails with a `RecursionError`. A step has the
    same shapes as the one before, so that shapes which vary gain nothing.

    ## Example
    ```
    mesh (tp = 8, dp_replicate = 4)
    shard on tp { layers.*.feed_forward.w2 = rowwise, layers.*.feed_forward.{w1, w3} = colwise }
    compile { layers.* = inductor(dynamic = true) }
    ```

    ## Use instead
    ```
    mesh (tp = 8, dp_replicate = 4)
    shard on tp { layers.*.feed_forward.w2 = rowwise, layers.*.feed_forward.{w1, w3} = colwise }
    compile { layers.* = inductor }
    ```
    """

    code = "LP640"
    slug = "dynamic-shapes-of-shards"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan = analysis.plan
        shard = plan.shard_on("tp")
        if plan.mesh.tp == 1 or shard is None or is_traced(analysis) or analysis.manifest is None:
            return
        sharded = analysis.assigned(shard).by_path
        varying = (
            (path, rule)
            for path, rule in compiled_modules(analysis).items()
            if isinstance(rule.treatment, Inductor) and rule.treatment.dynamic
        )
        for rule, paths in grouped(varying):
            pair = next(
                ((path, inner) for path in paths for inner in sharded if inner == path or below(inner, path)), None
            )
            if pair is None:
                continue
            maker = sharded[pair[1]].origin.span
            yield self.at(
                analysis.span_of(rule.treatment, "dynamic"),
                f"`{name_of(pair[0])}` cannot be compiled for shapes that vary: `{pair[1]}` is sharded on `tp`",
                label="shapes that vary",
                others=[] if maker is None else [Label(maker, "makes DTensors")],
                help=["compile for the shapes of a step, which do not vary: leave `dynamic` out"],
                fix=replacement(rule.treatment, "dynamic", "false"),
            )
