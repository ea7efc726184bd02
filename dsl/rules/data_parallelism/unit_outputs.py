"""`precision`: the dtype in which units hand their outputs on, and the modules that take them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.blocks import general
from legoai.dsl.analysis.facts import holders
from legoai.dsl.analysis.parallelism.experts import distributed_experts
from legoai.dsl.analysis.parallelism.fsdp import fsdp_units
from legoai.dsl.analysis.parallelism.replicate import gradient_buckets, replicas
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check

if TYPE_CHECKING:
    from legoai.specs.models.manifests.manifest import Manifest


class OutputOfUnits(Check):
    """Units that pass their outputs in one dtype to a layer whose weights are in another.

    `output` is the dtype that every unit returns, and a unit casts its inputs to `param`. A linear layer that is not a
    unit itself, but belongs to the enclosing unit, reads the output of an inner unit as it is, and PyTorch refuses to
    multiply matrices of two dtypes. The buckets of `replicate` are such units, and so are experts on ranks of `ep`.

    ## Example
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit }
    precision (param = bf16, output = fp32)
    ```

    ## Use instead
    ```
    mesh (dp_shard = 32)
    fsdp on dp_shard { layers.* = unit, {norm, output} = unit }
    precision (param = bf16, output = fp32)
    ```
    """

    code = "LP618"
    slug = "output-of-units"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        precision, manifest = analysis.plan.precision, analysis.manifest
        if precision.output in (None, precision.param) or manifest is None:
            return
        if replicas(analysis) is not None:
            buckets = [bucket.paths for bucket in gradient_buckets(analysis)]
            taking, giving = {paths[0] for paths in buckets}, {paths[-1] for paths in buckets}
        elif analysis.plan.fsdp is not None:
            taking = giving = set(fsdp_units(analysis)) | set(distributed_experts(analysis))
        else:
            return
        met = next(_Following(manifest, taking, giving).call("", ()), None)
        if met is None:
            return
        layer, unit = general(manifest, met.layer), general(manifest, met.unit)
        yield self.at(
            analysis.span_of(precision, "output"),
            f"`{layer}` has weights in {precision.param} and gets what the unit `{unit}` gives, in {precision.output}",
            label=f"what every unit returns is in {precision.output}",
            others=_makers(analysis, met),
            help=_cures(analysis, met, layer),
        )


def _makers(analysis: Analysis, met: _Met) -> list[Label]:
    replicate = replicas(analysis)
    if replicate is not None:
        return [Label(analysis.span_of(replicate), "reduces gradients in buckets, each of which is a unit")]
    made = fsdp_units(analysis).get(met.unit)
    maker = distributed_experts(analysis)[met.unit] if made is None else made.rule
    return [] if maker is None or maker.origin.span is None else [Label(maker.origin.span, "makes units")]


def _cures(analysis: Analysis, met: _Met, layer: str) -> list[str]:
    if replicas(analysis) is not None:
        return ["leave `output` out"]
    around = next(path for path in holders(met.layer) if path in fsdp_units(analysis)) or "root"
    return [
        f"make it a unit of its own, which casts what it takes: `{layer} = unit` (it is a part of `{around}`)",
        "or leave `output` out",
    ]


class _Met:
    """A layer that is no unit, and the unit whose output it gets."""

    def __init__(self, layer: str, unit: str) -> None:
        self.layer = layer
        self.unit = unit


class _Following:
    """Follows the outputs of units along the forward to the first linear layer that reads one as it is."""

    def __init__(self, manifest: Manifest, taking: AbstractSet[str], giving: AbstractSet[str]) -> None:
        self.manifest = manifest
        self.taking = taking
        """The modules that cast what they are given."""
        self.giving = giving
        """The modules whose result is in the dtype of `output`."""
        self.given: str | None = None
        """The unit that produced the output of the module followed last."""

    def call(self, path: str, arguments: Sequence[str | None]) -> Iterator[_Met]:
        """Go through a module whose arguments come from these units; None where from none, or where they are cast."""
        info = self.manifest.modules[path]
        if path in self.taking:
            arguments = [None] * len(arguments)
        result = next((unit for unit in arguments if unit is not None), None)
        if info.kind == "linear":
            if result is not None:
                yield _Met(path, result)
            result = None
        elif info.kind == "embedding":
            result = None
        elif info.flow:
            made: list[str | None] = []
            inputs = sum(step.op == "input" for step in info.flow)
            pending = iter(arguments if len(arguments) == inputs else [result] * inputs)
            for step in info.flow:
                taken = [made[index] for index in step.inputs]
                if step.op == "input":
                    made.append(next(pending))
                elif step.op == "call":
                    yield from self.call(info.child_path(step.name), taken)
                    made.append(self.given)
                else:
                    made.append(None if step.op == "cast" else next((unit for unit in taken if unit), None))
            result = next((made[index] for index in info.outputs if made[index] is not None), None)
        self.given = path if path and path in self.giving else result
