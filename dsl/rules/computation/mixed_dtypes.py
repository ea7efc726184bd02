"""`precision`: rules about tensors that are wider than the parameters they meet."""

from __future__ import annotations

from collections.abc import Container, Iterator

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.blocks import general
from legoai.dsl.analysis.computation.precision import autocast_dtype
from legoai.dsl.analysis.facts import written
from legoai.dsl.analysis.parallelism.fsdp import fsdp_units
from legoai.dsl.analysis.parallelism.replicate import gradient_buckets, replicas
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check
from legoai.specs.dtypes import DTYPE_BYTES


class MixedDtypes(Check):
    """An operator that gets a buffer in fp32, or a tensor that forward makes in fp32, beside parameters in bf16.

    `precision` decides the dtype of parameters, and units of `fsdp` and `replicate` cast what their modules are called
    with. Buffers stay as the model makes them, and so does what forward makes by `torch.linspace` or `x.float()`. A sum
    of a tensor in fp32 and one in bf16 is in fp32; a product of matrices, a convolution, a normalisation or attention
    takes one dtype alone, and fails. Without units, autocast casts both.

    Lint runs forward on the meta device with parameters in bf16. Within `torch.autocast` it finds nothing.
    """

    code = "LP644"
    slug = "mixed-dtypes"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        manifest, precision = analysis.manifest, analysis.plan.precision
        if manifest is None or not manifest.mixed_dtypes or DTYPE_BYTES[precision.param] > 2:
            return
        if autocast_dtype(analysis) is not None:
            return
        units = _units(analysis)
        casts_results = precision.output is not None and DTYPE_BYTES[precision.output] <= 2
        for mixed in manifest.mixed_dtypes:
            if _any_in(mixed.entered, units) or (casts_results and _any_in(mixed.left, units)):
                continue
            yield self.at(
                analysis.span_of(precision, "param"),
                f"`{mixed.operator}` in `{general(manifest, mixed.module)}` gets a tensor in fp32, from "
                f"{mixed.source}, beside parameters or activations in {precision.param}",
                label="fails in forward" if written(precision, "param") else "`param` is bf16 by default",
                others=[Label(analysis.span_of(analysis.plan.model, "target"), "this model")],
                help=["cast it where it is used, as by `.to(x.dtype)`", "or write `param = fp32`"],
            )
            return


def _units(analysis: Analysis) -> set[str]:
    """Return the paths of the modules whose arguments are cast."""
    if replicas(analysis) is not None:
        return {"", *(path for bucket in gradient_buckets(analysis) for path in bucket.paths)}
    return set(fsdp_units(analysis))


def _any_in(paths: tuple[str, ...], units: Container[str]) -> bool:
    return any(path in units for path in paths)
