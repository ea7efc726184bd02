"""Checks of the fields of a built-in model's config, and their metadata.

Importing this module never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

Scalar = bool | int | float | str
"""Values that a plan can give to a field of a config."""


class ConfigError(ValueError):
    """A model's preset or field is invalid.

    Attributes:
        argument: the offending name: `family`, `preset`, or the name of a config field.
        message: the problem, for the author of a plan.
        legal: the accepted values where they can be listed, else empty.
    """

    def __init__(self, argument: str, message: str, legal: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.argument = argument
        self.message = message
        self.legal = legal


MOST_LAYERS: Final = 1000
"""Most layers of a built-in model, as in the deepest published Transformer (DeepNet, Wang et al. 2022). Building and
tracing a model with so many layers takes some ten seconds; more is likely a mistake."""


MOST_ELEMENTS: Final = 2**40
"""Most elements of one parameter or table: 4 TiB in fp32, some hundred times the largest of any published model. More
would overflow torch's count of bytes, or is a mistake."""


def doc(text: str) -> dict[str, str]:
    """Metadata of a field: its documentation."""
    return {"doc": text}


def switch(text: str) -> dict[str, str]:
    """Metadata of a field that programs leave out where it has its default."""
    return {"doc": text, "left_out": "at its default"}


def require_positive(config: Any, *names: str) -> None:
    """Check that fields are positive, and that the number of layers is not absurd."""
    for name in names:
        value = getattr(config, name)
        if value <= 0:
            raise ConfigError(name, f"{name} must be positive, got {value}")
        if name == "n_layers" and value > MOST_LAYERS:
            raise ConfigError(name, f"n_layers = {value} is more than {MOST_LAYERS}, the most that is looked at")


def require_addressable(config: Any, *products: tuple[str, ...]) -> None:
    """Check the sizes of the largest tensors, each the product of some fields."""
    for names in products:
        values = {name: int(getattr(config, name)) for name in names}
        if math.prod(values[name] for name in names) > MOST_ELEMENTS:
            largest = max((item.name for item in fields(config) if item.name in values), key=values.__getitem__)
            product = " x ".join(f"{name} = {values[name]}" for name in names)
            raise ConfigError(
                largest, f"{product} makes a tensor of more than 2**40 elements, the most that is looked at"
            )


def require_divides(config: Any, divisor: str, dividend: str, *, because: str) -> None:
    """Check that one field divides another."""
    small, large = getattr(config, divisor), getattr(config, dividend)
    if large % small:
        legal = tuple(str(n) for n in range(1, large + 1) if large % n == 0) if large <= 1 << 16 else ()
        raise ConfigError(divisor, f"{divisor} = {small} must divide {dividend} = {large}: {because}", legal)


def check_types(config: Any) -> None:
    """Check the types of all fields, and make numbers of whole ones."""
    for item in fields(config):
        expected = _FIELD_TYPES[str(item.type)]
        value = getattr(config, item.name)
        if expected is float and type(value) is int:
            object.__setattr__(config, item.name, float(value))
        elif type(value) is not expected:
            got = type(value).__name__
            raise ConfigError(item.name, f"{item.name} must be {_TYPE_WORDS[expected]}, got {got} {value!r}")
        if expected is float and not math.isfinite(value):
            raise ConfigError(item.name, f"{item.name} must be a finite number, got {value}")


_FIELD_TYPES: Mapping[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
_TYPE_WORDS: Mapping[type, str] = {int: "an integer", float: "a number", bool: "true or false", str: "a quoted name"}
