"""Column-wise layers with overlapped backward communication, and the configurations that exclude them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.blocks import general
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.computation.checkpoint import recomputed_modules
from legoai.dsl.analysis.computation.compile import compiled_modules
from legoai.dsl.analysis.facts import below
from legoai.dsl.analysis.layouts.tensors import as_list
from legoai.dsl.analysis.parallelism.float8 import converted_layers
from legoai.dsl.analysis.parallelism.fsdp import fsdp_units
from legoai.dsl.analysis.parallelism.graph import is_traced
from legoai.dsl.analysis.parallelism.shard import readers, shard_on_tp, tensor_parallel
from legoai.dsl.analysis.stages.pipeline import splits_backward
from legoai.dsl.analysis.unsupported import Unsupported
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.hole import Hole
from legoai.specs.directives.layouts import Replicated, Sharded
from legoai.specs.directives.shard import Colwise, Inputs

if TYPE_CHECKING:
    from legoai.specs.models.manifests.manifest import Manifest, ModuleInfo, Step

_OFF = "or leave `overlap` out"


def overlaps(style: object) -> bool:
    """Whether a style requests it.

    Raises:
        Undecided: the option is a hole.
    """
    return isinstance(style, Colwise | Inputs) and bool(style.overlap == "backward")


@fact
def overlapped(analysis: Analysis) -> dict[str, tuple[str, ...]]:
    """Return the modules for which `overlap` has an effect, with the layers that read the gathered input.

    Raises:
        Undecided: the size of `tp` or a treatment on it is a hole.
    """
    styles = tensor_parallel(analysis).styles
    asked = [path for path, rule in styles.items() if overlaps(rule.treatment)]
    return {path: layers(analysis, path) for path in asked if idle(analysis, path) is None}


@fact
def possibly_overlapped(analysis: Analysis) -> dict[str, tuple[str, ...]]:
    """Return the same for all modules whose backward may overlap communication, as far as that is decided.

    Raises:
        Undecided: the size of `tp` is a hole, or a treatment on it is one where some may.
    """
    shard = shard_on_tp(analysis)
    if shard is None or not any(_may_ask(rule.treatment) for rule in shard.rules):
        return {}
    styles = {path: rule.treatment for path, rule in tensor_parallel(analysis).styles.items()}
    return {path: layers(analysis, path) for path, style in styles.items() if _may_ask(style)}


def _may_ask(treatment: object) -> bool:
    """Whether a treatment may request it; an `auto` without a list has no such answer."""
    if isinstance(treatment, Hole):
        return any(map(_may_ask, treatment.domain or ()))
    if not isinstance(treatment, Colwise | Inputs):
        return False
    return isinstance(treatment.overlap, Hole) or treatment.overlap == "backward"


def layers(analysis: Analysis, path: str) -> tuple[str, ...]:
    """Return the layers that read a module's gathered input: the layer itself, or those that the module contains."""
    assert analysis.manifest is not None
    style, info = tensor_parallel(analysis).styles[path].treatment, analysis.manifest.modules[path]
    if isinstance(style, Colwise):
        return (path,)
    return tuple(info.child_path(step.name) for step in readers(info, style))


def idle(analysis: Analysis, path: str) -> str | None:
    """Return why `overlap` of a module has no effect, as the rest of a sentence about it; None where it has one.

    Raises:
        Undecided: the size of `tp` or a treatment on it is a hole.
    """
    assert analysis.manifest is not None
    styles, info = tensor_parallel(analysis).styles, analysis.manifest.modules[path]
    style = styles[path].treatment
    if isinstance(style, Colwise):
        if info.kind != "linear":
            return "is no linear layer, and gathers nothing"
        return None if _along_sequence(style.input) else "does not gather its input, which is not `input = shard(1)`"
    assert isinstance(style, Inputs)
    pairs = zip(as_list(style.source), as_list(style.target), strict=False)
    converted = [pair for pair in pairs if "none" not in pair]
    if len(converted) != 1 or not _along_sequence(converted[0][0]) or not isinstance(converted[0][1], Replicated):
        return "does not gather one input, from `shard(1)` to `replicate`"
    if style.local or style.then is not None:
        return "takes plain tensors, or converts outputs too" if style.local else "converts outputs too"
    return _reader(info, readers(info, style), styles)


def _reader(info: ModuleInfo, steps: tuple[Step, ...], styles: dict[str, PathRule[Any]]) -> str | None:
    """Return why the steps that read a module's input are not all single calls of column-wise layers."""
    if not steps:
        return "has an input of which it is not known what reads it"
    for step in steps:
        if step.op != "call":
            return f"reads its input itself (`{step.name}`), and needs it whole"
        reader = info.child_path(step.name)
        rule = styles.get(reader)
        style = None if rule is None else rule.treatment
        if not isinstance(style, Colwise) or (style.input is not None and not isinstance(style.input, Replicated)):
            return f"gives its input to `{step.name}`, which is no `colwise` layer that takes it whole"
        if sum(other.op == "call" and other.name == step.name for other in info.flow) > 1 or len(step.inputs) != 1:
            return f"calls `{step.name}` more than once, or with more than its input"
    return None


def _along_sequence(layout: Any) -> bool:
    return isinstance(layout, Sharded) and layout.dim == 1


def supports(analysis: Analysis) -> Iterator[Unsupported]:
    """Yield layers that the containing module computes one after another, eagerly."""
    manifest, seen = analysis.manifest, set[int]()
    if manifest is None:
        return
    for path, inside in overlapped(analysis).items():
        rule = tensor_parallel(analysis).styles[path]
        if id(rule) in seen:
            continue
        found = _beside(analysis, path, inside)
        if found is not None:
            seen.add(id(rule))
            why, *cures = found
            yield Unsupported(
                analysis.span_of(rule.treatment, "overlap"),
                f"the backward of {_named(manifest, path)} cannot hide its communication: {why}",
                "not beside it",
                (*cures, _OFF),
            )


def _beside(analysis: Analysis, path: str, inside: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return other treatments that conflict with a module's layers, and remedies; None without a conflict."""
    assert analysis.manifest is not None
    named = partial(_named, analysis.manifest)
    if is_traced(analysis):
        return "`backend = graph` orders the collectives of a step itself", "write `backend = eager`"
    if splits_backward(analysis):
        why = "the schedule computes the gradients of weights apart from those of inputs"
        return why, "write `schedule = 1F1B` or `Interleaved1F1B`"
    for held in compiled_modules(analysis):
        if held == path or below(path, held) or below(held, path):
            why = f"{named(held)} is compiled, whose collectives the compiler orders"
            return why, "take it out of `compile`, or let that hide them: `compile (async_tp = true)`"
    for held in inside:
        if held in converted_layers(analysis):
            return f"{named(held)} computes in float8", "take it out of the rules of `precision`"
    between = [held for layer in inside if layer != path for held in _from(path, layer)]
    for name, held_by in (("fsdp", fsdp_units(analysis)), ("checkpoint", recomputed_modules(analysis))):
        for held in between:
            if held in held_by:
                why = f"its layers are computed together, and `{name}` treats {named(held)} apart"
                return why, f"let `{name}` treat {named(path)} as a whole"
    return None


def _named(manifest: Manifest, path: str) -> str:
    return f"`{general(manifest, path)}`"


def _from(path: str, layer: str) -> Iterator[str]:
    """Yield a layer, and its ancestors inside a module."""
    while layer != path:
        yield layer
        layer = layer.rpartition(".")[0]
