"""Rules about parameters that cannot be sharded: those without dims, without elements, of other dtypes or layouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.blocks import general
from legoai.dsl.analysis.facts import grouped, listed, written
from legoai.dsl.analysis.magnitudes.trained import untrained_parameters
from legoai.dsl.analysis.parallelism.shard import placement
from legoai.dsl.analysis.training.optimizer import parameter_rules, update_of
from legoai.dsl.diagnostics.diagnostic import Diagnostic, Label
from legoai.dsl.rules.base import Check

if TYPE_CHECKING:
    from legoai.specs.directives.base import PathRule
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


class NonContiguousParameter(Check):
    """A parameter that is not contiguous in memory, under `fsdp` or `replicate`, or placed by `shard on tp`.

    A transposed parameter is not (`nn.Parameter(torch.randn(8, 16).t())`), nor are the weights of convolutions in
    `channels_last`. `fsdp` and `replicate` become `fully_shard`, which takes contiguous parameters only. `shard on tp`
    makes each rank's part of a parameter contiguous, but its gradient follows the layout of the whole. Fused kernels
    go through both in the order of memory: on a CPU they would update elements with the gradients of others, and on a
    GPU they refuse such tensors (PyTorch 2.13).

    Make the parameter contiguous in the factory. A convolution computes in `channels_last` if its images are laid out
    so, whatever the layout of its weight. Under `shard on tp` an optimizer with `fused = false` updates any layout.
    """

    code = "LP525"
    slug = "non-contiguous-parameter"

    def check(self, analysis: Analysis) -> Iterator[Diagnostic]:
        plan, manifest = analysis.plan, analysis.manifest
        if manifest is None:
            return
        strided = [path for path, item in _parameters(manifest) if not item.contiguous]
        use = plan.fsdp if plan.fsdp is not None else plan.replicate
        if not strided:
            return
        if use is not None:
            yield self.at(
                analysis.span_of(use),
                f"{_not_contiguous(manifest, strided)}, and `{use.keyword}` shards only contiguous parameters",
                label="`fully_shard` refuses other layouts",
                others=[Label(analysis.span_of(plan.model, "family"), "this model")],
                help=_made_contiguous(manifest, strided),
            )
            return
        algorithm = plan.optimizer.algorithm
        updates = algorithm if written(algorithm, "fused") else plan.optimizer
        for rule, paths in grouped(_placed_and_fused(analysis, strided)):
            yield self.at(
                analysis.rule_span(rule),
                f"{_not_contiguous(manifest, paths)}, and fused kernels, which go through memory in its order, "
                "would update a rank's part by gradients of other elements",
                label="makes the parts contiguous",
                others=[
                    Label(analysis.span_of(plan.model, "family"), "this model"),
                    Label(analysis.span_of(updates, "fused"), "updates by fused kernels"),
                ],
                help=[
                    *_made_contiguous(manifest, paths),
                    "or write `fused = false`: `foreach` kernels take any layout",
                ],
            )


def _placed_and_fused(analysis: Analysis, paths: list[str]) -> Iterator[tuple[str, PathRule[Any]]]:
    """Yield those parameters that tensor parallelism makes DTensors and a fused kernel updates, with their rules."""
    algorithm, rules, untrained = (
        analysis.plan.optimizer.algorithm,
        parameter_rules(analysis),
        untrained_parameters(analysis),
    )
    for path in paths:
        rule = placement(analysis, path).rule
        if rule is not None and path not in untrained and update_of(rules.get(path), algorithm).get("fused"):
            yield path, rule


def _not_contiguous(manifest: Manifest, paths: list[str]) -> str:
    """The beginning of a sentence about these parameters; equal blocks are named once."""
    named = list(dict.fromkeys(general(manifest, path) for path in paths))
    return f"{listed(named)} {'are' if len(named) > 1 else 'is'} not contiguous in memory"


def _made_contiguous(manifest: Manifest, paths: list[str]) -> list[str]:
    """Return what helps: for weights of convolutions of images, and for other parameters."""
    found = {}
    for path in paths:
        module, _, name = path.rpartition(".")
        info = manifest.modules[module]
        dims = next(len(item.shape) for item in info.parameters if item.name == name)
        if info.kind == "convolution" and dims in _CHANNELS_LAST:
            found[_CHANNELS_LAST[dims]] = (
                "leave the weights of convolutions contiguous, and convert the images in forward: "
                f"`x.contiguous(memory_format = torch.{_CHANNELS_LAST[dims]})`; convolutions follow their input"
            )
        else:
            found.setdefault(
                "",
                "make it contiguous in the factory: "
                f"`module.{name} = nn.Parameter(module.{name}.detach().contiguous())`",
            )
    return list(found.values())


_CHANNELS_LAST: Final = {4: "channels_last", 5: "channels_last_3d"}
"""Memory formats of images and volumes in torch, by the dims of a convolution's weight."""


def _parameters(manifest: Manifest) -> Iterator[tuple[str, TensorInfo]]:
    """Yield every parameter with its path."""
    for module in manifest.modules.values():
        for parameter in module.parameters:
            yield module.child_path(parameter.name), parameter
