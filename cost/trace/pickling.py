"""Pickling of frozen dataclasses with slots by the order of their fields.

The standard library looks up the fields of every object by name, which takes several times as long: traces have
hundreds of thousands of objects, and are sent between processes.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T", bound=type)


def pickled_by_position(cls: T) -> T:
    """Pickle the objects of a frozen dataclass with slots as their values, in the order of its fields."""
    names = [item.name for item in dataclasses.fields(cls)]
    if not names:
        return cls
    values = operator.attrgetter(*names)
    if len(names) == 1:

        def reduce(self: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return restored, (cls, (values(self),))
    else:

        def reduce(self: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return restored, (cls, values(self))

    cls.__reduce__ = reduce  # type: ignore[method-assign, assignment]
    return cls


@functools.cache
def _setters(cls: type) -> Sequence[Callable[[Any, Any], None]]:
    return [getattr(cls, item.name).__set__ for item in dataclasses.fields(cls)]


def restored(cls: type, values: Sequence[Any]) -> Any:
    """Return an object of a dataclass with slots, given its values; like `__init__` without `__post_init__`."""
    made: Any = object.__new__(cls)
    for put, value in zip(_setters(cls), values, strict=True):
        put(made, value)
    return made
