"""Styles and placements on `tp`: styles of modules, layouts of parameters, and the layer of the logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.blocks import general
from legoai.dsl.analysis.caching import fact
from legoai.dsl.analysis.facts import decided, listed, name_of
from legoai.dsl.analysis.layouts.propagation import PLACEABLE
from legoai.dsl.analysis.unsupported import Unsupported
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.layouts import Replicated, Sharded
from legoai.specs.directives.shard import Colwise, Heads, Inputs, Outputs, Rowwise, SequenceStyle, Shard, Shared
from legoai.specs.record import Record

if TYPE_CHECKING:
    from legoai.specs.models.manifests.manifest import Manifest, ModuleInfo, Step

STYLES: Final = (Colwise, Rowwise, SequenceStyle, Heads, Shared, Inputs, Outputs)
"""Treatments of modules on `tp`."""
PLACEMENTS: Final = (Replicated, Sharded)
"""Treatments of parameters on `tp`."""
DISTRIBUTING: Final = (Colwise, Rowwise, SequenceStyle, Heads)
"""Styles that place the parameters of their module."""


class TensorParallel(Record):
    """The rules of `shard on tp` by their subject, in model order."""

    styles: dict[str, PathRule[Any]]
    """By module."""
    placements: dict[str, PathRule[Any]]
    """By parameter."""


def shard_on_tp(analysis: Analysis) -> Shard | None:
    """The statement on `tp`; None where the axis has one rank, on which every placement is the whole tensor."""
    return analysis.plan.shard_on("tp") if analysis.plan.mesh.tp > 1 else None


@fact
def tensor_parallel(analysis: Analysis) -> TensorParallel:
    """The styles and placements on several ranks of `tp`, without those of the wrong sort, which rules report.

    Raises:
        Undecided: the size of `tp` or a treatment is a hole.
    """
    shard, manifest = shard_on_tp(analysis), analysis.manifest
    if shard is None or manifest is None:
        return TensorParallel({}, {})
    decided(shard)
    modules = frozenset(analysis.module_paths.names)
    styles, placements = {}, {}
    for path, rule in analysis.assigned(shard).by_path.items():
        if path in modules and isinstance(rule.treatment, STYLES):
            styles[path] = rule
        elif path not in modules and isinstance(rule.treatment, PLACEMENTS):
            placements[path] = rule
    return TensorParallel(styles, placements)


@fact
def placed_modules(analysis: Analysis) -> dict[str, dict[str, PathRule[Any]]]:
    """Return the modules with individually placed parameters, each with these parameters' rules by name.

    Raises:
        Undecided: the size of `tp` or a treatment is a hole.
    """
    found: dict[str, dict[str, PathRule[Any]]] = {}
    for path, rule in tensor_parallel(analysis).placements.items():
        module, _, name = path.rpartition(".")
        found.setdefault(module, {})[name] = rule
    return found


class Placement(Record):
    """Layout of one parameter on `tp`."""

    dim: int | None
    """The sharded dim, counted from the first; None where every rank holds the full parameter."""
    rule: PathRule[Any] | None
    """The rule that places it; None where none does, so that it stays a plain tensor."""

    @property
    def is_plain(self) -> bool:
        """Whether it is a plain tensor."""
        return self.rule is None

    def is_like(self, other: Placement) -> bool:
        """Whether one parameter can lie in both ways."""
        return self.dim == other.dim and self.is_plain == other.is_plain

    def describe(self, other: Placement) -> str:
        """Describe the layout, which differs from ``other``, as the end of a sentence."""
        if self.dim is not None:
            return f"cut along dim {self.dim}"
        if other.dim is not None:
            return "whole"
        return "a plain tensor" if self.is_plain else "a whole DTensor"


def placement(analysis: Analysis, path: str) -> Placement:
    """Return the layout that tensor parallelism gives the parameter at ``path``.

    As ``ColwiseParallel`` and ``RowwiseParallel`` do: torch/distributed/tensor/parallel/style.py, `_partition_*_fn`.
    """
    assert analysis.manifest is not None
    found = tensor_parallel(analysis)
    module, _, name = path.rpartition(".")
    own = found.placements.get(path)
    if own is not None:
        dim = own.treatment.dim if isinstance(own.treatment, Sharded) else None
        return Placement(dim if dim is None or dim >= 0 else dim + _dims(analysis.manifest, module, name), own)
    beside = placed_modules(analysis).get(module)
    if beside is not None:
        return Placement(None, next(iter(beside.values())))  # beside a parameter that is placed, on every rank
    rule = found.styles.get(module)
    if rule is None or not isinstance(rule.treatment, DISTRIBUTING):
        return Placement(None, None)
    if isinstance(rule.treatment, SequenceStyle | Heads):
        return Placement(None, rule)
    colwise = isinstance(rule.treatment, Colwise)
    if analysis.manifest.modules[module].kind == "embedding":
        return Placement(1 if colwise else 0, rule)
    if name == "bias":
        return Placement(0 if colwise else None, rule)
    return Placement(0 if colwise else 1, rule)


def _dims(manifest: Manifest, module: str, name: str) -> int:
    return next(len(item.shape) for item in manifest.modules[module].parameters if item.name == name)


def last_module(manifest: Manifest) -> str | None:
    """Return the module whose result is the model's own, where the flow shows it."""
    info = manifest.modules[""]
    while info.outputs:
        step = info.flow[info.outputs[0]]
        if step.op != "call":
            return info.path or None
        info = manifest.modules[info.child_path(step.name)]
    return info.path or None


@fact
def parallel_loss(analysis: Analysis) -> PathRule[Any] | None:
    """Return the rule of the layer whose logits stay sharded over the vocabulary, if there is one."""
    for rule in tensor_parallel(analysis).styles.values():
        if isinstance(rule.treatment, Colwise) and rule.treatment.loss_parallel:
            return rule
    return None


def is_never_called(manifest: Manifest, path: str) -> bool:
    """Whether the model's forward is known, and does not call the module."""
    info = manifest.modules[path]
    return manifest.flow_error is None and not info.flow and not inputs_of(info)


def inputs_of(info: ModuleInfo) -> tuple[str, ...]:
    """The names of the arguments of a module's forward: those by position, then those by keyword."""
    return (*info.inputs, *info.keyword_inputs)


def outputs_of(info: ModuleInfo) -> int:
    """Return the number of tensors that a module's forward returns; 1 where its flow does not show it."""
    return max(1, len(info.outputs))


def readers(info: ModuleInfo, style: Inputs) -> tuple[Step, ...]:
    """Return the readers of the one input of a module that its style converts, by its flow; nothing for several inputs.

    An input that the module returns has unknown readers, so there is no result for it.
    """
    sources = style.source if isinstance(style.source, tuple) else (style.source,)
    converted = [name for name, layout in zip(inputs_of(info), sources, strict=False) if layout != "none"]
    given = {index for index, step in enumerate(info.flow) if step.op == "input" and step.name in converted}
    if len(converted) != 1 or given.intersection(info.outputs):
        return ()
    return tuple(step for step in info.flow if given.intersection(step.inputs))


def supports(analysis: Analysis) -> Iterator[Unsupported]:
    """Conversions of known inputs, and layouts of parameters that layers themselves hold and compute with."""
    manifest = analysis.manifest
    if manifest is None:
        return
    yield from _placed(analysis, manifest)
    faults = _not_their_own(analysis)
    seen: set[int] = set()
    for path, rule in tensor_parallel(analysis).styles.items():
        if id(rule) in seen:
            continue
        if isinstance(rule.treatment, DISTRIBUTING):
            held = faults.get(path)
            if held is not None:
                seen.add(id(rule))
                yield Unsupported(
                    analysis.rule_span(rule),
                    f"`{rule.treatment.name}` distributes the parameters that a layer itself holds and computes with, "
                    f"and `{name_of(path)}` {held}",
                    "this layer",
                    (f"leave `{general(manifest, path)}` out of `shard on tp`",),
                )
        elif isinstance(rule.treatment, Inputs):
            seen.add(id(rule))
            if not inputs_of(manifest.modules[path]) and not is_never_called(manifest, path):
                yield Unsupported(
                    analysis.rule_span(rule),
                    f"`{name_of(path)}` was not seen to be called, so that its inputs are not known",
                    "no inputs",
                )


@fact
def _not_their_own(analysis: Analysis) -> Mapping[str, str]:
    """What keeps a style from distributing the parameters of layers, by path; nothing for most layers."""
    assert analysis.manifest is not None
    manifest = analysis.manifest
    return {path: held for path in manifest.modules if (held := _not_its_own(manifest, path)) is not None}


def _not_its_own(manifest: Manifest, path: str) -> str | None:
    """What keeps a style from distributing a layer's parameters, as the end of a sentence; None where nothing does."""
    info = manifest.modules[path]
    if info.kind not in (*PLACEABLE, "other"):
        return None  # another rule reports the style
    inside = list(_parameters_inside(manifest, path))
    if _computes_weight(info):
        found = [name for name in (*(item.name for item in info.parameters), *inside) if name != "bias"]
        return f"computes its weight from {listed(found)}"
    return f"has `{inside[0]}` inside of it" if inside else None


def _computes_weight(info: ModuleInfo) -> bool:
    """Whether a layer has no weight but one that it computes from other parameters, as weight normalisation does."""
    return info.kind in ("linear", "embedding") and all(item.name != "weight" for item in info.parameters)


def _parameters_inside(manifest: Manifest, path: str, prefix: str = "") -> Iterator[str]:
    """Yield the names of the parameters of a module's descendants, relative to it."""
    for name in manifest.modules[path].children:
        child = manifest.modules[f"{path}.{name}"]
        yield from (f"{prefix}{name}.{item.name}" for item in child.parameters)
        yield from _parameters_inside(manifest, child.path, f"{prefix}{name}.")


def _placed(analysis: Analysis, manifest: Manifest) -> Iterator[Unsupported]:
    """Yield placed parameters of modules whose own forward combines them with plain tensors."""
    seen: set[int] = set()
    for module, rules in placed_modules(analysis).items():
        info = manifest.modules[module]
        if info.kind in PLACEABLE and not info.children and not _computes_weight(info):
            continue
        for name, rule in rules.items():
            if id(rule) not in seen:
                seen.add(id(rule))
                yield Unsupported(
                    analysis.rule_span(rule),
                    f"`{name_of(module)}` ({info.class_name}) computes with `{name}` in a forward of its own, in which "
                    "a DTensor would meet plain tensors",
                    "cannot be placed by itself",
                    ("placements are for the parameters of linear layers, embeddings and norms",),
                )
