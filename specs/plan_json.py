"""Canonical JSON of a resolved plan: reading, and the JSON's schema.

The text of a plan is for people; its canonical form (:meth:`legoai.specs.plan.Plan.canonical`), of which its digest is
made, states every value, for programs. Both are described by the same directive models: here they become pydantic
models, which check and convert.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Final, Literal, Union

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError
from pydantic import create_model as create_pydantic_model

from legoai.specs.directives import DEFAULTED, FAMILIES, REQUIRED, family, kinds
from legoai.specs.directives.base import Calls, Declared, Directive, Option, PathRule, Treatment
from legoai.specs.plan import DEFAULTS, Plan


class PlanJsonError(ValueError):
    """JSON that is no canonical plan; ``problems`` lists the problems, each with its path in the data."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def read_plan(text: str) -> Plan:
    """Return the plan with this canonical JSON.

    A plan with holes has no such form to be read: it is not yet one plan.

    Raises:
        PlanJsonError: the text is no JSON, or no plan.
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanJsonError((f"not JSON: {error}",)) from error
    try:
        checked = plan_model().model_validate(body)
    except ValidationError as error:
        problems = tuple(f"{'.'.join(map(str, item['loc'])) or 'plan'}: {item['msg']}" for item in error.errors())
        raise PlanJsonError(problems) from error
    data = checked.model_dump(by_alias=True, exclude_unset=True)
    fields: dict[str, Any] = {keyword: family(keyword)() for keyword in DEFAULTED}
    for keyword, value in data.items():
        if keyword in FAMILIES:
            declared = family(keyword)
            several = declared.repeats_by_axis
            fields[keyword] = (
                tuple(_directive(item, declared) for item in value) if several else _directive(value, declared)
            )
    return Plan(name=data["name"], files=tuple(sorted(data.get("files", {}).items())), **fields)


def schema() -> dict[str, Any]:
    """The JSON Schema of a plan's canonical form."""
    return plan_model().model_json_schema(by_alias=True)


@cache
def plan_model() -> type[BaseModel]:
    """The pydantic model of a plan's canonical form."""
    fields: dict[str, Any] = {
        "format": (Literal[2], ...),
        "defaults": (Literal[DEFAULTS], ...),
        "name": (StrictStr, ...),
    }
    for keyword in FAMILIES:
        declared = family(keyword)
        directive = _model(declared)
        if declared.repeats_by_axis:
            fields[keyword] = (list[directive], Field(default_factory=list))  # type: ignore[valid-type]
        elif keyword in REQUIRED:
            fields[keyword] = (directive, ...)
        else:
            fields[keyword] = (directive, None)
    fields["files"] = (dict[StrictStr, StrictStr], Field(default_factory=dict))
    return create_pydantic_model("Plan", __config__=_STRICT, __doc__="A resolved plan.", **fields)


_STRICT: Final = ConfigDict(extra="forbid", populate_by_name=True)
_MODELS: dict[type[Declared], type[BaseModel]] = {}


def _model(declared: type[Declared]) -> type[BaseModel]:
    held = _MODELS.get(declared)
    if held is None:
        fields = {item.field: _field(item) for item in declared.options}
        if issubclass(declared, Treatment):
            fields["treatment"] = (Literal[declared.name], ...)
        if issubclass(declared, Directive):
            fields |= _parts(declared)
        held = _MODELS[declared] = create_pydantic_model(
            declared.__name__, __config__=_STRICT, __doc__=declared.__doc__, **fields
        )
    return held


def _field(item: Option) -> Any:
    kind = _TYPES[type(item.kind)](item.kind)
    if item.required:
        return kind, Field(alias=item.name, description=item.doc)
    # Omitted values have their defaults, which the directive itself fills in.
    return kind, Field(default=None, alias=item.name, description=item.doc)


def _parts(declared: type[Directive]) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    if declared.axis_use is not None:
        parts["axes"] = (list[Literal[declared.axis_use.names]], Field(alias="on"))  # type: ignore[name-defined]
    if declared.treatments is not None:
        lines = tuple(
            create_pydantic_model(
                f"{treatment.__name__}PathRule",
                __base__=_model(treatment),
                __doc__=treatment.__doc__,
                path=(StrictStr, ...),
            )
            for treatment in declared.treatments.treatments
        )
        parts["rules"] = (list[_discriminated(lines)], Field(default_factory=list))  # type: ignore[misc]
    if declared.open_options:
        scalar = StrictBool | StrictInt | float | StrictStr
        parts["arguments"] = (dict[str, scalar], Field(default_factory=dict))
    return parts


def _discriminated(models: tuple[type[BaseModel], ...]) -> Any:
    return models[0] if len(models) == 1 else Annotated[Union[models], Field(discriminator="treatment")]  # noqa: UP007


def _listed(kind: kinds.Listed) -> Any:
    def known(name: str) -> str:
        if name not in kind.names():
            raise ValueError(f"expected {kind.describe()}")
        return name

    return Annotated[StrictStr, AfterValidator(known)]


def _list(kind: kinds.ListOf) -> Any:
    bounds = Field(min_length=kind.length, max_length=kind.length)
    return Annotated[list[_TYPES[type(kind.item)](kind.item)], bounds]  # type: ignore[misc]


_TYPES: Final[Mapping[type[kinds.Kind], Callable[[Any], Any]]] = {
    kinds.Choice: lambda kind: Literal[kind.names],
    kinds.Listed: _listed,
    kinds.Integer: lambda kind: Annotated[StrictInt, Field(ge=kind.minimum, le=kind.maximum)],
    kinds.Number: lambda kind: Annotated[float, Field(ge=kind.minimum, le=kind.maximum, gt=kind.above, lt=kind.below)],
    kinds.Boolean: lambda _: StrictBool,
    kinds.Text: lambda _: StrictStr,
    kinds.Size: lambda kind: Annotated[StrictInt, Field(ge=kind.minimum)],
    kinds.Fraction: lambda _: Annotated[float, Field(ge=0, le=1)],
    kinds.ModulePath: lambda _: StrictStr,
    kinds.ListOf: _list,
    Calls: lambda kind: _discriminated(tuple(_model(treatment) for treatment in kind.treatments)),
    kinds.Either: lambda kind: Union[tuple(_TYPES[type(item)](item) for item in kind.kinds)],  # noqa: UP007
}


def _directive(data: Mapping[str, Any], declared: type[Directive]) -> Directive:
    rules = []
    if declared.treatments is not None:
        by_name = {treatment.name: treatment for treatment in declared.treatments.treatments}
        for line in data.get("rules", ()):
            rules.append(PathRule(path=line["path"], treatment=_declared(line, by_name[line["treatment"]])))
    extra = {"axes": tuple(data.get("on", ())), "rules": tuple(rules), "arguments": data.get("arguments", {})}
    return declared(**_values(data, declared), **extra)


def _declared(data: Mapping[str, Any], declared: type[Declared]) -> Declared:
    return declared(**_values(data, declared))


def _values(data: Mapping[str, Any], declared: type[Declared]) -> dict[str, Any]:
    return {item.field: _value(data[item.name], item.kind) for item in declared.options if item.name in data}


def _value(data: Any, kind: kinds.Kind) -> Any:
    """Return checked JSON data as the value of a directive."""
    if isinstance(data, list):
        items = [item for item in _choices(kind) if isinstance(item, kinds.ListOf)]
        return tuple(_value(entry, items[0].item) for entry in data)
    if isinstance(data, dict):
        treatments = [found for item in _choices(kind) if isinstance(item, Calls) for found in item.treatments]
        return _declared(data, next(found for found in treatments if found.name == data["treatment"]))
    return data


def _choices(kind: kinds.Kind) -> tuple[kinds.Kind, ...]:
    return tuple(one for item in kind.kinds for one in _choices(item)) if isinstance(kind, kinds.Either) else (kind,)
