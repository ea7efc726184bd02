"""A value that is still to be decided: `auto`."""

from __future__ import annotations

from typing import Any, Final, Literal, NoReturn

from legoai.specs.span import Span

_MOST_LISTED: Final = 1000
"""Members of a range that are listed one by one; of a longer one, the ends represent it."""


class Undecided(Exception):  # noqa: N818 - a state, not an error
    """A decision depends on a hole's value.

    Raised where code computes or compares with a hole, so that a check cannot treat an undecided value as decided. The
    linter catches it for each rule: checks of undecided values are skipped.
    """


def _undecided(self: Hole, *_: object) -> NoReturn:
    raise Undecided(f"{self!r} is not decided yet")


class Hole:
    """An `auto` without an answer. Everything but ``isinstance`` and :meth:`describe` raises :class:`Undecided`."""

    __slots__ = ("domain", "span")

    def __init__(self, domain: tuple[Any, ...] | range | None = None, span: Span | None = None) -> None:
        self.domain = domain
        """The values to choose from; None for every legal one."""
        self.span = span
        """Of the `auto` in the text, one for all uses of a `let`; None for a value that could not be read."""

    def describe(self) -> dict[str, Any]:
        """The hole as plain JSON data."""
        domain: list[Any] | Literal["legal"]
        if isinstance(self.domain, range) and len(self.domain) > _MOST_LISTED:
            domain = [f"{self.domain[0]}..{self.domain[-1]}"]
        else:
            domain = "legal" if self.domain is None else [str(item) for item in self.domain]
        return {"auto": domain}

    def __repr__(self) -> str:
        return f"Hole({self.domain!r})"

    # Looking a hole up in a table uses its value too.
    __hash__ = _undecided
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _undecided
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _undecided
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __neg__ = _undecided
    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = __contains__ = __getitem__ = _undecided
    __divmod__ = __rdivmod__ = __pow__ = __rpow__ = __abs__ = __round__ = __reversed__ = _undecided
    __format__ = __str__ = __call__ = _undecided

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Undecided(f"{name} of {self!r} is not decided yet")
