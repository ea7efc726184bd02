"""Places of tokens in their sequence that a forward counts itself, from the length of what it is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple


class CountedPlaces(NamedTuple):
    """What one module's forward itself counts; what its children count is theirs."""

    by: str = ""
    """In words, what counts the places that it combines with activations although the model is given `positions`, such
    as `arange`; noted for models of other authors that take these."""
    ignores_positions: bool = False
    """Of the model: whether its result does not depend on the positions that it is given, where it is not known that
    forward counts no places itself."""
    steps: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Steps of its flow whose results differ from place to place and are as long as what it is given, each with the
    dims along which they are, counted from the last (-1); noted for models of other authors that read tokens."""

    def dims_of(self, step: int) -> tuple[int, ...]:
        """The dims along which a step of its flow tells places; none of other steps."""
        return next((dims for known, dims in self.steps if known == step), ())


NO_PLACES: Final = CountedPlaces()


def places_from(raw: Mapping[str, Any] | None) -> CountedPlaces:
    """Read the serialised form; None is that of no places."""
    if raw is None:
        return NO_PLACES
    steps = tuple((int(step), tuple(dims)) for step, dims in raw.get("steps", ()))
    return CountedPlaces(raw.get("by", ""), raw.get("ignores_positions", False), steps)


def raw_places(places: CountedPlaces) -> dict[str, Any]:
    """The serialised form, without what is as in `NO_PLACES`."""
    by, ignores_positions, steps = places
    found = {"by": by, "ignores_positions": ignores_positions, "steps": [[*item] for item in steps]}
    return {name: value for name, value in found.items() if value}
