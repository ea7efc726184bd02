"""The optimizer of a TorchTitan config in Python: groups of parameters with constants, or fields without groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from legoai.dsl.diagnostics.codes.importing import ConfigValue
from legoai.dsl.importing.config import Config, refuse
from legoai.dsl.importing.python_values import Made, Unread, Value
from legoai.specs.span import Span

Put: TypeAlias = Callable[[str, Value, Span, str | None], None]
"""Records an option: its path in the file, value, span, and name where that is another than the path."""

_DEFAULTS: Final[Mapping[str, Value]] = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}
"""Of `torch.optim.Adam` and `AdamW`, which TorchTitan gives nothing that a group does not say."""

_DECAY: Final = {"Adam": 0.0, "AdamW": 0.01}
"""`weight_decay`, by the same."""

_OF_CONTAINER: Final = frozenset({"param_groups", "implementation", "optimizer_factory_kwargs_by_name"})
_WRITE: Final = "write it as an argument of `default_adamw`, or into `optimizer_kwargs` of the group"


def refuse_no_groups(config: Config, span: Span) -> None:
    """Report an optimizer that has no parameters, which TorchTitan refuses too."""
    message = "no parameter has an optimizer: `param_groups` is not given"
    help = ["write `optimizer=default_adamw(lr=…)`"]
    config.diagnostics.append(ConfigValue.at(span, message, label="this config", help=help))


def read_optimizer(*, config: Config, value: Value, span: Span, put: Put) -> None:
    """Record the optimizer's options."""
    last = value.name.rpartition(".")[2] if isinstance(value, Made) else ""
    is_usual = last == "default_adamw"
    if not isinstance(value, Made) or (last and not is_usual and not last.endswith("Config")):
        put("optimizer", value, span, "optimizer.param_groups" if isinstance(value, Made | Unread) else None)
        return
    if "OptimizersInBackward" in value.name:
        put("optimizer", True, span, "optimizer.early_step_in_backward")
    # Fields of what the function returns are assigned outside of its call.
    is_field = {name: not is_usual or not _encloses(value.span, there) for name, there in value.spans.items()}
    fields = {name: held for name, held in value.options.items() if is_field[name]}
    groups = fields.pop("param_groups", None)
    if not is_usual and groups is None and not config.is_current:
        for name, held in fields.items():
            put(f"optimizer.{name}", held, value.spans[name], None)
        return
    for name, held in fields.items():
        if name not in _OF_CONTAINER:
            config.places[f"optimizer.{name}"] = value.spans[name]
            refuse(config, f"optimizer.{name}", held, [_WRITE])
    if made := fields.get("optimizer_factory_kwargs_by_name"):
        path = "optimizer.optimizer_factory_kwargs_by_name"
        put(path, made, value.spans["optimizer_factory_kwargs_by_name"], None)
    way = fields.get("implementation", "fused"), value.spans.get("implementation", span)
    if groups is not None:
        _group(config, groups, value.spans["param_groups"], way, put)
    elif is_usual:
        constants = dict(zip(["lr"], value.arguments, strict=False)) | value.named
        places = {name: span if is_field.get(name, True) else value.spans[name] for name in constants}
        _constants(config, constants, places, way, put)
    else:
        refuse_no_groups(config, span)


def _encloses(outer: Span, inner: Span) -> bool:
    return outer.file == inner.file and outer.start <= inner.start and inner.end <= outer.end


def _group(config: Config, groups: Value, span: Span, way: tuple[Value, Span], put: Put) -> None:
    """The last group, which has all parameters that no earlier one has."""
    if groups == []:
        refuse_no_groups(config, span)
        return
    last = groups[-1] if isinstance(groups, list) else groups
    if not isinstance(groups, list) or not isinstance(last, Made):
        put("optimizer.param_groups", last if isinstance(last, Made | Unread) else str(last), span, None)
        return
    if len(groups) > 1 or last.options.get("pattern") not in (".*", "", ".+"):
        patterns = [one.options.get("pattern") for one in groups if isinstance(one, Made)]
        put("optimizer.param_groups", ", ".join(map(str, patterns)), span, None)
    name = last.options.get("optimizer_name")
    put("optimizer.name", name, last.spans.get("optimizer_name", last.span), None)
    given = last.options.get("optimizer_kwargs", {})
    place = last.spans.get("optimizer_kwargs", last.span)
    if not isinstance(given, dict):
        put("optimizer.optimizer_kwargs", given, place, "optimizer.lr")
        return
    decay = _DECAY.get(name, 0.0) if isinstance(name, str) else 0.0
    constants = {**_DEFAULTS, "weight_decay": decay, **{str(key): held for key, held in given.items()}}
    _constants(config, constants, dict.fromkeys(constants, place), way, put)


def _constants(
    config: Config, constants: Mapping[str, Value], spans: Mapping[str, Span], way: tuple[Value, Span], put: Put
) -> None:
    """Record the arguments of an optimizer's class; ``way`` is the container's `implementation`."""
    chosen = {name: constants[name] for name in ("fused", "foreach") if name in constants}
    if not chosen or isinstance(way[0], Unread | Made) or way[0] == "fused_opt_states_bf16":
        if way[0] != "fused":
            put("optimizer.implementation", *way, None)
    else:
        name = next(iter(chosen))
        put(f"optimizer.{name}", _implementation(chosen, way[0]), spans[name], "optimizer.implementation")
    for name, held in constants.items():
        if name == "betas" and isinstance(held, list) and len(held) == 2:
            for path, one in zip(("beta1", "beta2"), held, strict=True):
                put(f"optimizer.{path}", one, spans[name], None)
        elif name == "betas":
            put("optimizer.betas", held, spans[name], "optimizer.beta1")
        elif name in _OF_CONTAINER:
            config.places[f"optimizer.{name}"] = spans[name]
            refuse(config, f"optimizer.{name}", held, ["it is a field of `OptimizersContainer.Config`"])
        elif name not in chosen:
            put(f"optimizer.{name}", held, spans[name], None)


def _implementation(chosen: Mapping[str, Value], way: Value) -> Value:
    """What a group's `fused` and `foreach` make of the container's implementation, as torch decides."""
    unread = next((held for held in chosen.values() if isinstance(held, Unread | Made)), None)
    if unread is not None:
        return unread
    fused, foreach = chosen.get("fused", way == "fused"), chosen.get("foreach", way == "foreach")
    if fused and foreach:
        return Unread("`fused` and `foreach` at once, which torch refuses")
    if fused:
        return "fused"
    return "foreach" if foreach or (fused is None and foreach is None) else "for-loop"
