"""Kinds of values, with which every option, subject and treatment is declared.

A kind defines which values are legal, and describes them for messages. Reading a value from a plan's text is done by
``legoai.dsl.frontend.values.coerce``; nothing here depends on the syntax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from legoai.specs.record import Record, replace

REST: Final = "rest"
"""Stands for the number that completes a product; resolution replaces it."""


class Kind(Record):
    """A set of legal values."""

    __slots__ = ()

    def describe(self) -> str:
        """The legal values, as the end of the sentence "expected …"."""
        raise AssertionError(f"{type(self).__name__} does not say what it holds")


class Choice(Kind):
    """One of a fixed set of names."""

    names: tuple[str, ...]

    def describe(self) -> str:
        return either_of([f"`{name}`" for name in self.names])


class Listed(Kind):
    """One of a set of names that is computed on demand, such as the devices of the catalogue."""

    names: Callable[[], tuple[str, ...]]
    noun: str

    def describe(self) -> str:
        return f"{self.noun}: {either_of([f'`{name}`' for name in self.names()])}"


class Integer(Kind):
    """A whole number, with an optional range, both ends included; ``rest`` where :data:`REST` is allowed."""

    minimum: int | None = None
    maximum: int | None = None
    rest: bool = False

    def describe(self) -> str:
        if self.rest:
            return either_of([replace(self, rest=False).describe(), f"`{REST}`"])
        if self.minimum is not None and self.maximum is not None:
            return f"a whole number from {self.minimum} to {self.maximum}"
        if self.minimum is not None:
            return f"a whole number of at least {self.minimum}"
        return "a whole number"


class Number(Kind):
    """A real number, with an optional range; ``above`` excludes its end."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None

    def describe(self) -> str:
        bounds = []
        if self.minimum is not None:
            bounds.append(f"at least {self.minimum:g}")
        if self.above is not None:
            bounds.append(f"greater than {self.above:g}")
        if self.maximum is not None:
            bounds.append(f"at most {self.maximum:g}")
        if self.below is not None:
            bounds.append(f"less than {self.below:g}")
        return "a number" + (" " + " and ".join(bounds) if bounds else "")


class Boolean(Kind):
    """``true`` or ``false``."""

    def describe(self) -> str:
        return "`true` or `false`"


class Text(Kind):
    """A quoted string; ``noun`` describes it, and all of it matches the regular expression ``pattern``."""

    noun: str = "a quoted string"
    pattern: str = "(?s).*"

    def describe(self) -> str:
        return self.noun


class Size(Kind):
    """An amount of memory with its unit, held as a number of bytes."""

    minimum: int = 1

    def describe(self) -> str:
        return "an amount of memory such as `25MB` or `4GiB`"


class Fraction(Kind):
    """A share between 0 and 1, written as a number or as a percentage."""

    def describe(self) -> str:
        return "a fraction such as `0.5` or `50%`"


class ModulePath(Kind):
    """A module's path, as ``named_modules()`` prints it."""

    def describe(self) -> str:
        return "a module path such as `layers.8`"


class ListOf(Kind):
    """A list whose items are all of one kind."""

    item: Kind
    length: int | None = None

    def describe(self) -> str:
        count = f"{self.length} items" if self.length is not None else "items"
        return f"a list of {count}, each {self.item.describe()}"


class Either(Kind):
    """A value of any of several kinds; the first that fits."""

    kinds: tuple[Kind, ...]

    def describe(self) -> str:
        # An option may be a word, and a treatment of that name with arguments.
        return either_of(list(dict.fromkeys(kind.describe() for kind in self.kinds)))


def parts_of(kind: Kind) -> Iterator[Kind]:
    """The kinds of which a value may be any."""
    if isinstance(kind, Either):
        for inner in kind.kinds:
            yield from parts_of(inner)
    else:
        yield kind


def either_of(words: list[str]) -> str:
    """Return the words as a list in prose: "a, b or c"."""
    if len(words) <= 1:
        return "".join(words)
    return f"{', '.join(words[:-1])} or {words[-1]}"
