"""Schema of a profile's JSON: pydantic models against which users' own profiles are checked.

A test checks the shipped profiles, so that a cost on a catalogued device does not import pydantic. Constraints between
numbers (segments in order, arrays of equal length) are checked where each model is read.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from legoai.cost.kernels.features import ATTENTION_FEATURES, PRODUCT_FEATURES
from legoai.cost.kernels.kinds import MovementForm, MovementKind
from legoai.specs.device_file import LEAST_RATE, MOST_RATE
from legoai.specs.profile_file import FORMAT, ProfileError

# Ranges are far wider than what machines have: beyond them times overflow.
Finite = Annotated[float, Field(ge=-1e18, le=1e18, allow_inf_nan=False, strict=True)]
Logarithm = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False, strict=True)]
Positive = Annotated[float, Field(ge=1e-12, le=1e18, allow_inf_nan=False, strict=True)]
Rate = Annotated[float, Field(ge=LEAST_RATE, le=MOST_RATE, allow_inf_nan=False, strict=True)]
Seconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False, strict=True)]
Count = Annotated[int, Field(ge=1, le=1_000_000, strict=True)]


def _equal(names: tuple[str, ...], found: list[str]) -> list[str]:
    if tuple(found) != names:
        raise ValueError(f"expected {', '.join(names)}")
    return found


class _Section(BaseModel):
    model_config = ConfigDict(extra="allow")


class _ProductCurve(_Section):
    peak: Rate
    bandwidth: Rate
    efficiency: Positive
    processors: Count
    floor: Seconds
    split: Count
    tiles: Annotated[list[tuple[Count, Count, Positive]], Field(min_length=1)]
    sustained: Positive | None
    more_of_group: Seconds = 0.0


class _AttentionCurve(_Section):
    peak: Rate
    bandwidth: Rate
    floor: Seconds
    processors: Count
    limits: Annotated[
        dict[Annotated[str, Field(pattern=r"^[1-9]\d* (causal|full)$")], tuple[Positive, Finite, Finite]],
        Field(min_length=1),
    ]


class _Table(_Section):
    points: list[Any]
    ratios: list[Logarithm]
    reach: Seconds


class _ProductTable(_Table):
    points: list[tuple[Logarithm, Logarithm, Logarithm, Logarithm]]


class _AttentionTable(_Table):
    points: list[tuple[Logarithm, Logarithm, Logarithm, Logarithm, Logarithm]]


class _Forest(_Section):
    names: Any
    low: list[Finite]
    high: list[Finite]
    feature: list[int]
    threshold: list[Finite]
    left: list[int]
    right: list[int]
    value: list[Logarithm]
    roots: list[int]


class _ProductForest(_Forest):
    names: Annotated[list[str], AfterValidator(functools.partial(_equal, PRODUCT_FEATURES))]


class _AttentionForest(_Forest):
    names: Annotated[list[str], AfterValidator(functools.partial(_equal, ATTENTION_FEATURES))]


class _Model(_Section):
    """A model of products or of attention, or the name of the model whose curve it uses."""

    curve: Any = None
    like: str | None = None
    observed: _Table | None = None
    table: _Table | None = None
    forest: _Forest | None = None
    scale: Positive = 1.0
    margin: Seconds = 1.0
    derived: str = ""

    @model_validator(mode="after")
    def _one_of_both(self) -> _Model:
        if (self.curve is None) == (self.like is None):
            raise ValueError("needs `curve`, or `like` and the name of another model")
        if self.like is not None and not self.derived:
            raise ValueError("needs `derived` beside `like`: why the other model holds")
        return self


class _ProductModel(_Model):
    curve: _ProductCurve | None = None
    observed: _ProductTable | None = None
    table: _ProductTable | None = None
    forest: _ProductForest | None = None


class _AttentionModel(_Model):
    curve: _AttentionCurve | None = None
    observed: _AttentionTable | None = None
    table: _AttentionTable | None = None
    forest: _AttentionForest | None = None
    unmasked: str = ""


class _Movement(_Section):
    rate: Rate
    floor: Seconds
    points: list[tuple[Positive, Seconds]] = []
    derived: str = ""


_FORMS = [form for form in get_args(MovementForm) if form]
_MOVEMENTS = {
    *get_args(MovementKind),
    *_FORMS,
    *(f"{kind} {form}" for kind in get_args(MovementKind) for form in _FORMS),
}
"""Names of movements: kinds, forms, and kinds in a form."""


class _Link(_Section):
    sigmoid: tuple[Rate, Finite, Finite]
    latency: Seconds
    points: list[tuple[Positive, Seconds]] = []
    derived: str = ""


class _Constant(BaseModel):
    model_config = ConfigDict(extra="forbid")

    value: Finite
    source: str


class _Profile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: Literal[FORMAT]  # type: ignore[valid-type]
    device: str
    made: str
    constants: dict[str, _Constant]
    products: Annotated[dict[str, _ProductModel], Field(min_length=1)]
    attention: dict[Annotated[str, Field(pattern=r"^\S+ (forward|backward) \S+$")], _AttentionModel]
    movement: dict[str, _Movement]
    arithmetic: dict[str, Rate]
    links: dict[
        str,
        Annotated[dict[Annotated[str, Field(pattern=r"^([2-9]|[1-9]\d+)$")], _Link], Field(min_length=1)],
    ]
    sources: list[dict[str, Any]]
    held_out: dict[str, dict[str, Any]]
    fabrics: dict[str, dict[Annotated[str, Field(pattern=r"^\S+ \d+ \d+$")], list[tuple[Positive, Positive]]]] = {}

    @model_validator(mode="after")
    def _complete(self) -> _Profile:
        missing = [kind for kind in get_args(MovementKind) if kind not in self.movement]
        if missing:
            raise ValueError(f"movement: {', '.join(missing)} missing")
        unknown = [name for name in self.movement if name not in _MOVEMENTS]
        if unknown:
            raise ValueError(f"movement: {', '.join(unknown)} unknown")
        for models in (self.products, self.attention):
            for name, model in models.items():
                if model.like is not None and getattr(models.get(model.like), "curve", None) is None:
                    raise ValueError(f"{name}: like `{model.like}`, which has no curve")
        return self


def check(document: object) -> None:
    """Check a profile's JSON.

    Raises:
        ProfileError: it violates the schema; the message names the first invalid field.
    """
    try:
        _Profile.model_validate(document)
    except ValidationError as error:
        first, *others = error.errors()
        place = ".".join(str(part) for part in first["loc"])
        more = f" (and {len(others)} more)" if others else ""
        raise ProfileError(f"{place}: {first['msg']}{more}" if place else f"{first['msg']}{more}") from error
