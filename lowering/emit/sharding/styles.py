"""Styles and layouts of `shard`, written with the classes of `torch.distributed.tensor`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from legoai.dsl.analysis.parallelism.float8 import gathered_activations
from legoai.dsl.analysis.parallelism.overlap import overlapped
from legoai.dsl.analysis.parallelism.shard import inputs_of, outputs_of
from legoai.dsl.analysis.training.loss import layer_of_loss
from legoai.lowering.emit.base import Draft, Lowering, rule_note
from legoai.lowering.emit.code import Group, Item, Node, call, dictionary, quoted, sequence
from legoai.specs.directives.base import PathRule
from legoai.specs.directives.layouts import Partial, Replicated, Sharded
from legoai.specs.directives.shard import Colwise, Heads, Inputs, Outputs, Rowwise, SequenceStyle, Shared

_FLOAT8_MODULE: Final = "legoai.runtime.float8"
_OVERLAPPED_MODULE: Final = "legoai.runtime.parallelism.overlapped_backward"
Layouts = list[Replicated | Sharded | Partial | None]


def layout(value: Any, draft: Draft) -> str:
    """Return a layout as torch writes it."""
    name = {"replicate": "Replicate", "shard": "Shard", "partial": "Partial"}[value.name]
    draft.imports.name("torch.distributed.tensor", name)
    return f"{name}({value.dim})" if isinstance(value, Sharded) else f"{name}()"


def style(lowering: Lowering, path: str, rule: PathRule[Any], draft: Draft) -> Group:
    """Return the style of the module at ``path``."""
    if path != layer_of_loss(lowering.analysis):
        return _style(lowering, path, rule, draft)
    # The loss calls the layer as a whole, and its forward for each piece.
    draft.imports.name("legoai.runtime.parallelism.styles", "OutputInForward")
    return call("OutputInForward", Item(_style(lowering, path, rule, draft), note=rule_note(rule)))


def _style(lowering: Lowering, path: str, rule: PathRule[Any], draft: Draft) -> Group:
    treatment = rule.treatment
    float8 = path in gathered_activations(lowering.analysis)
    if isinstance(treatment, Colwise):
        return _colwise(treatment, draft, float8=float8, overlaps=path in overlapped(lowering.analysis))
    if isinstance(treatment, Rowwise):
        embedding = lowering.manifest.modules[path].kind == "embedding"
        return _rowwise(treatment, draft, embedding=embedding, float8=float8)
    if isinstance(treatment, SequenceStyle):
        dim = None if treatment.dim == 1 else str(treatment.dim)
        if treatment.local and outputs_of(lowering.manifest.modules[path]) > 1:
            draft.imports.name("legoai.runtime.parallelism.styles", "SequenceParallelResults")
            return call("SequenceParallelResults", sequence_dim=dim)
        local = "True" if treatment.local else None
        return _made("SequenceParallel", draft, sequence_dim=dim, use_local_output=local)
    if isinstance(treatment, Heads):
        draft.imports.name("legoai.runtime.parallelism.styles", "HeadParallel")
        return call("HeadParallel")
    if isinstance(treatment, Shared):
        draft.imports.name("legoai.runtime.parallelism.styles", "SharedByHeads")
        return call("SharedByHeads")
    if isinstance(treatment, Inputs):
        return _inputs(lowering, path, rule, draft, float8=float8)
    assert isinstance(treatment, Outputs), f"no style for {treatment!r}"
    return _outputs(lowering, path, rule, draft)


def placed(rules: Mapping[str, PathRule[Any]], draft: Draft) -> Group:
    """Return the style of a module with placements of these parameters, by name."""
    draft.imports.name("legoai.runtime.parallelism.styles", "PlacedParameters")
    return call("PlacedParameters", **{name: layout(rule.treatment, draft) for name, rule in rules.items()})


def _made(name: str, draft: Draft, **arguments: Node | None) -> Group:
    draft.imports.name(_home(name), name)
    return call(name, **arguments)


def _home(name: str) -> str:
    if name.startswith("Overlapped"):
        return _OVERLAPPED_MODULE
    return _FLOAT8_MODULE if name.startswith("float8_") else "torch.distributed.tensor.parallel"


def _optional(value: Any, draft: Draft) -> str | None:
    return None if value is None else layout(value, draft)


def _colwise(style: Colwise, draft: Draft, *, float8: bool, overlaps: bool) -> Group:
    output = style.output or (Sharded(dim=-1) if style.loss_parallel else None)
    return _made(
        "OverlappedColwise" if overlaps else "float8_colwise" if float8 else "ColwiseParallel",
        draft,
        input_layouts=_optional(style.input, draft),
        output_layouts=_optional(output, draft),
        use_local_output="False" if style.loss_parallel else None,
    )


def _rowwise(style: Rowwise, draft: Draft, *, embedding: bool, float8: bool) -> Group:
    # RowwiseParallel expects a sharded input by default, and token ids are replicated.
    source = style.input or (Replicated() if embedding else None)
    return _made(
        "float8_rowwise" if float8 else "RowwiseParallel",
        draft,
        input_layouts=_optional(source, draft),
        output_layouts=_optional(style.output, draft),
    )


def _inputs(lowering: Lowering, path: str, rule: PathRule[Any], draft: Draft, *, float8: bool) -> Group:
    """Return layouts for every argument of the module's forward: by position, then by keyword."""
    info = lowering.manifest.modules[path]
    names = inputs_of(info)
    before, after = _pairs(rule.treatment, len(names))
    split = len(info.inputs)
    options: dict[str, Node | None] = {}
    if any(item is not None for item in before[:split]):
        options["input_layouts"] = _tuple(before[:split], draft)
        options["desired_input_layouts"] = _tuple(after[:split], draft)
    keywords = [(names[index], index) for index in range(split, len(names)) if before[index] is not None]
    if keywords:
        for option, values in (("input_kwarg_layouts", before), ("desired_input_kwarg_layouts", after)):
            entries = [(name, _or_none(values[index], draft), None) for name, index in keywords]
            options[option] = dictionary(entries)
    style = rule.treatment
    linears = overlapped(lowering.analysis).get(path)
    if linears is not None:
        return _overlapped(path, linears, options, draft)
    if style.then is None:
        local = "True" if style.local else None
        name = "float8_inputs" if float8 else "PrepareModuleInput"
        return _made(name, draft, **options, use_local_output=local)
    leaving = _leaving(lowering, path, style.then, draft)
    return _made(
        "PrepareModuleInputOutput", draft, **options, use_local_input="True" if style.local else None, **leaving
    )


def _overlapped(path: str, linears: tuple[str, ...], options: Mapping[str, Node | None], draft: Draft) -> Group:
    """Return the same for layers that all-gather their input themselves: their paths, and the input's layout."""
    draft.imports.name(_OVERLAPPED_MODULE, "OverlappedInput")
    arriving = {name: value for name, value in options.items() if not name.startswith("desired_")}
    return call("OverlappedInput", *(quoted(linear.removeprefix(f"{path}.")) for linear in linears), **arriving)


def _outputs(lowering: Lowering, path: str, rule: PathRule[Any], draft: Draft) -> Group:
    return _made("PrepareModuleOutput", draft, **_leaving(lowering, path, rule.treatment, draft))


def _leaving(lowering: Lowering, path: str, style: Outputs, draft: Draft) -> dict[str, Node]:
    """Return layouts for every tensor that the module's forward returns."""
    before, after = _pairs(style, outputs_of(lowering.manifest.modules[path]))
    return {"output_layouts": _tuple(before, draft), "desired_output_layouts": _tuple(after, draft)}


def _pairs(style: Inputs | Outputs, count: int) -> tuple[Layouts, Layouts]:
    """Return the layouts before and after for each of the module's inputs or outputs; None leaves one unchanged."""
    before, after = _listed(style.source), _listed(style.target)
    assert len(before) == len(after) <= count, f"{style!r} for {count} tensors"
    padding: Layouts = [None] * (count - len(before))
    return before + padding, after + padding


def _listed(value: Any) -> Layouts:
    items = value if isinstance(value, tuple | list) else (value,)
    return [None if item == "none" else item for item in items]


def _tuple(layouts: Layouts, draft: Draft) -> Group:
    return sequence([_or_none(item, draft) for item in layouts])


def _or_none(item: Replicated | Sharded | Partial | None, draft: Draft) -> str:
    return "None" if item is None else layout(item, draft)
