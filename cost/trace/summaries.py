"""Results of analyses that are kept with what they are for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self, TypeVar

S = TypeVar("S")


class Summarised:
    """A trace or a segment, for which each analysis is computed once: a summary of the type that the analysis defines.

    The summary of a segment is independent of its instances' numbers, such as its effect on memory.
    """

    def summary(self, kind: Callable[[Self], S]) -> S:
        """Return the summary of a type, which is computed once."""
        found: S | None = self._summaries.get(kind)
        if found is None:
            found = self._summaries[kind] = kind(self)
        return found

    @functools.cached_property
    def _summaries(self) -> dict[Callable[..., Any], Any]:
        return {}
