"""Names of the language that no `let` may have, since a value of that name would be ambiguous.

Among them are the options that are true or false: their bare names set them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Final

from legoai.dsl.frontend.values.scope import FUNCTIONS
from legoai.specs.directives import FAMILIES, family, kinds
from legoai.specs.directives.base import Calls, Declared

_OWN: Final = ("auto", "true", "false", "in", "on", "root", "rest", "unset")


@cache
def reserved_names() -> dict[str, str]:
    """Return each name that may be a value, with the statement in which it has its meaning."""
    found = dict.fromkeys((*_OWN, *FUNCTIONS), "")
    for keyword in FAMILIES:
        declared = family(keyword)
        for owner in (declared, *declared.layouts):
            for name in _names(owner):
                found.setdefault(name, keyword)
        if declared.treatments is not None:
            for name in _legal(declared.treatments):
                found.setdefault(name, keyword)
    return found


def _names(declared: type[Declared]) -> Iterator[str]:
    for item in declared.options:
        if isinstance(item.kind, kinds.Boolean):
            yield item.name
        yield from _legal(item.kind)


def _legal(kind: kinds.Kind) -> Iterator[str]:
    if isinstance(kind, kinds.Choice):
        yield from kind.names
    elif isinstance(kind, kinds.Listed):
        yield from kind.names()
    elif isinstance(kind, Calls):
        for treatment in kind.treatments:
            yield treatment.name
            yield from _names(treatment)
    elif isinstance(kind, kinds.ListOf):
        yield from _legal(kind.item)
    elif isinstance(kind, kinds.Either):
        for item in kind.kinds:
            yield from _legal(item)
