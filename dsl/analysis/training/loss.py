"""Last layer that the loss computes in pieces, and what keeps it from that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.communication.comm import unit_buckets
from legoai.dsl.analysis.computation.checkpoint import recomputed_modules
from legoai.dsl.analysis.computation.compile import compiled_modules
from legoai.dsl.analysis.computation.precision import has_policy
from legoai.dsl.analysis.facts import holders, name_of
from legoai.dsl.analysis.parallelism.float8 import converted_layers
from legoai.dsl.analysis.parallelism.fsdp import fsdp_units, owner
from legoai.dsl.analysis.parallelism.overlap import overlapped
from legoai.dsl.analysis.parallelism.shard import tensor_parallel
from legoai.dsl.analysis.stages.pipeline import splits_backward
from legoai.dsl.analysis.unsupported import Unsupported
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.hole import Hole, Undecided
from legoai.specs.directives.loss import ChunkedLoss
from legoai.specs.directives.shard import Colwise, Rowwise
from legoai.specs.models.manifests.manifest import Manifest, ModuleInfo


def pieces_of_last_layer(form: Any) -> int:
    """Return in how many pieces a loss computes the model's last layer; 1 where the model's forward computes it.

    Args:
        form: of `loss`; of a hole, the most pieces of a form that it may become.

    Raises:
        Undecided: an option of a form is a hole.
    """
    if isinstance(form, Hole):  # without a domain it becomes no such form
        return max(map(pieces_of_last_layer, form.domain or ()), default=1)
    return form.n if isinstance(form, ChunkedLoss) and form.last_layer else 1


def takes_last_layer(form: Any) -> bool:
    """Whether a loss computes the model's last layer, or may come to compute it."""
    try:
        return pieces_of_last_layer(form) > 1
    except Undecided:
        return True


@fact
def layer_of_loss(analysis: Analysis) -> str | None:
    """Return the path of the layer that the loss computes in pieces; None where the model's forward computes it."""
    manifest = analysis.manifest
    if manifest is None or pieces_of_last_layer(analysis.plan.loss.form) == 1:
        return None
    return layer_of_logits(manifest)


def layer_of_logits(manifest: Manifest) -> str | None:
    """Return the linear layer that is called once, and whose result is only the model's own; None where there is none.

    A forward that also uses that result would do so with the layer's input, which is passed on in its place.
    """
    info = _returned_layer(manifest)
    return None if info is None or "result_use" in info.attributes else info.path


def _returned_layer(manifest: Manifest) -> ModuleInfo | None:
    """Return the linear layer that is called once, and whose result forward returns; None where there is none."""
    info = manifest.modules[""]
    while info.kind != "linear":
        last = info.flow[info.outputs[0]] if len(info.outputs) == 1 else None
        if last is None or last.op != "call" or [step[:2] for step in info.flow].count(last[:2]) > 1:
            return None
        info = manifest.modules[info.child_path(last.name)]
    # A subclass or a hook may compute more, and a weight may be computed from parameters, as by `weight_norm`.
    computes_more = info.class_name != "Linear" or "hooks" in info.attributes or manifest.is_shared(info.path)
    is_plain = {item.name for item in info.parameters} in ({"weight"}, {"weight", "bias"}) and not computes_more
    return info if info.path and is_plain else None


def supports(analysis: Analysis) -> Iterator[Unsupported]:
    """Last layers that are called by themselves, outside of the model's forward and of everything around that."""
    form = analysis.plan.loss.form
    if analysis.manifest is None or isinstance(form, Hole) or pieces_of_last_layer(form) == 1:
        return
    span = analysis.span_of(form, "last_layer")
    found = layer_of_loss(analysis)
    if found is None:
        info = _returned_layer(analysis.manifest)
        if info is None:
            why = "the last layer: the model does not return the result of a linear layer as it is"
        else:
            why = f"`{info.path}`: the model's forward takes its result, and {info.attributes['result_use']}"
        yield Unsupported(
            span,
            f"the loss cannot compute {why}",
            "no such layer",
            ("leave `last_layer` out: the loss alone is computed in pieces",),
        )
        return
    for message, label, cure in _obstacles(analysis, found):
        yield Unsupported(span, f"the loss cannot compute `{found}`: {message}", label, (cure,))


def _obstacles(analysis: Analysis, layer: str) -> Iterator[tuple[str, str, str]]:
    """Yield why the loss cannot call a layer by itself: a message, a label and a cure."""
    around = (layer, *holders(layer))
    for what, held in (
        ("compiled", compiled_modules(analysis)),
        ("recomputed", recomputed_modules(analysis)),
    ):
        path = next((path for path in around if path in held), None)
        if path is not None:
            yield f"`{name_of(path)}` is {what}", f"{what} as a whole", f"leave `{name_of(path)}` out of that statement"
    if layer in converted_layers(analysis):
        yield "it is converted to float8", "in float8", f"write `{layer} = none` in `precision`"
    yield from _styled(analysis, layer, around)
    precision = analysis.plan.precision
    if has_policy(analysis) and precision.output not in (None, precision.param):
        yield (
            f"the model would give it {precision.output}",
            f"`output = {precision.output}`",
            "leave `output` out of `precision`",
        )
    if splits_backward(analysis):
        yield (
            "the schedule computes the gradients of weights later than those of inputs, and the loss computes both",
            "gradients at once",
            "choose a schedule with whole backward passes, such as `1F1B` or `Interleaved1F1B`",
        )
    yield from _sharded(analysis, layer)


def _styled(analysis: Analysis, layer: str, around: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    styles: dict[str, PathRule[Any]] = tensor_parallel(analysis).styles
    path = next((path for path in around if path in styles), None)
    if path is None:
        return
    if path != layer or not isinstance(styles[path].treatment, Colwise | Rowwise):
        style = styles[path].treatment.name
        yield (
            f"`{style}` lays out what `{name_of(path)}` takes or gives",
            f"`{style}` of `{name_of(path)}`",
            f"write `{layer} = colwise(…)`, and no style of modules around it",
        )
    elif layer in overlapped(analysis):
        yield "its style overlaps its backward", "`overlap`", f"leave `overlap` out of the style of `{layer}`"


def _sharded(analysis: Analysis, layer: str) -> Iterator[tuple[str, str, str]]:
    """A unit that is freed after the model's forward, and gathered only by calls of another module."""
    if analysis.plan.fsdp is None:
        return
    units, path = fsdp_units(analysis), owner(analysis, f"{layer}.weight")
    alone = path == layer or any({path, layer} <= set(bucket.paths) for bucket in unit_buckets(analysis))
    if not alone and units[path].is_resharded_after_forward:
        yield (
            f"the unit `{name_of(path)}` frees its parameters after the model's forward",
            f"freed with `{name_of(path)}`",
            f"write `{layer} = unit(reshard = after_backward)` in `fsdp`",
        )
