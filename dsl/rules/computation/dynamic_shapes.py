"""`compile`: shapes that vary, in modules whose tensors tensor parallelism distributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.computation.compile import compiled_modules
from legoai.dsl.analysis.facts import grouped, holders, is_within, name_of, replacement
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.compile import Inductor
from legoai.specs.directives.layouts import Sharded
from legoai.specs.directives.shard import Inputs


class DynamicShapesOfShards(Check):
    """Modules compiled for shapes that vary, with layers that tensor parallelism shards.

    Tensor parallelism makes DTensors of weights and activations. For the backward pass of the views of a linear layer,
    PyTorch 2.13 computes symbolic sizes from each other without end, and compilation fails with a `RecursionError`;
    but not where what enters is cut along the sequence and gathered inside of the module. Such a module fails too, with
    `mul expected 2 arguments, got 3`, where a layer's features are divided into heads and `fsdp` shards the model: in a
    unit the number of heads, an attribute of the module, is a symbol as well. A step has the same shapes as the one
    before, so that shapes which vary gain nothing.

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
            inside = ((path, inner) for path in paths for inner in sharded if is_within(inner, path))
            pair = next((pair for pair in inside if _has_views(analysis, sharded, *pair)), None)
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


def _has_views(analysis: Analysis, sharded: Mapping[str, PathRule[Any]], path: str, inner: str) -> bool:
    """Whether a module inside of a compiled one is a linear layer whose views cannot be compiled.

    They can where a module there gathers what it reads, unless it reshapes under FSDP.
    """
    assert analysis.manifest is not None
    modules = analysis.manifest.modules
    if modules[inner if inner in modules else inner.rpartition(".")[0]].kind != "linear":  # of a parameter's rule
        return False
    within = [holder for holder in (inner, *holders(inner)) if is_within(holder, path)]
    if not any(_takes_pieces(sharded[holder].treatment) for holder in within if holder in sharded):
        return True
    flows = (modules[holder].flow for holder in within if holder in modules)
    return analysis.plan.fsdp is not None and any(step.op == "reshape" for flow in flows for step in flow)


def _takes_pieces(style: object) -> bool:
    """Whether what enters a module is cut along the sequence."""
    given = style.source if isinstance(style, Inputs) else getattr(style, "input", None)
    first = given[0] if isinstance(given, tuple) and given else given
    return isinstance(first, Sharded) and first.dim == 1
