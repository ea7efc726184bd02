"""Rules about parameters that units cannot shard: those without dims, without elements or of other dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.facts import listed
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check

if TYPE_CHECKING:
    from legoai.specs.models.manifests.manifest import Manifest, TensorInfo


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


class EmptyUnderFsdp(Check):
    """A parameter without elements, under `fsdp` or `replicate`.

    Units concatenate the gradients of their parameters to reduce them, and PyTorch refuses one without elements
    (PyTorch 2.13).

    Register the parameter only where it has elements, or freeze it.
    """

    code = "LP523"
    slug = "empty-under-fsdp"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan, manifest = analysis.plan, analysis.manifest
        use = plan.fsdp if plan.fsdp is not None else plan.replicate
        if use is None or manifest is None:
            return
        empty = [path for path, item in _parameters(manifest) if item.numel == 0 and not item.frozen]
        if empty:
            what = "have no elements" if len(empty) > 1 else "has no elements"
            yield self.at(
                analysis.span_of(use),
                f"{listed(empty)} {what}, and `{use.keyword}` cannot reduce such a gradient",
                label="reduces the gradients of all parameters",
                others=[Label(analysis.span_of(plan.model, "family"), "this model")],
                help=["register the parameter only where it has elements (`self.name = None` otherwise)"],
            )


class OtherDtypeUnderFsdp(Check):
    """A parameter of complex or whole numbers, under `fsdp` or `replicate`.

    A unit has one dtype for its parameters, that of `precision`: PyTorch refuses others beside it, and a cast would
    drop imaginary parts.

    Keep a complex parameter as one of real numbers with a last dim of 2, and let forward read it by
    `torch.view_as_complex`; keep whole numbers in a buffer.
    """

    code = "LP524"
    slug = "other-dtype-under-fsdp"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan, manifest = analysis.plan, analysis.manifest
        use = plan.fsdp if plan.fsdp is not None else plan.replicate
        if use is None or manifest is None:
            return
        found = {path: item.dtype for path, item in _parameters(manifest) if item.dtype}
        if found:
            dtypes = list(dict.fromkeys(found.values()))
            yield self.at(
                analysis.span_of(use),
                f"{listed(list(found))} {'are' if len(found) > 1 else 'is'} of {' and '.join(dtypes)}, and a unit of "
                f"`{use.keyword}` has parameters of one floating-point dtype",
                label="casts all parameters to the dtype of `precision`",
                others=[Label(analysis.span_of(plan.model, "family"), "this model")],
                help=[
                    "keep it as real numbers, [..., 2], and read it by `torch.view_as_complex`"
                    if dtypes[0].startswith("complex")
                    else "keep whole numbers in a buffer"
                ],
            )


def _parameters(manifest: Manifest) -> Iterator[tuple[str, TensorInfo]]:
    """Yield every parameter with its path."""
    for module in manifest.modules.values():
        for parameter in module.parameters:
            yield module.child_path(parameter.name), parameter
