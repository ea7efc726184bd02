"""Rounds of a trace: neighbouring micro batches that are equal but for the numbers that each makes anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Equal micro batches that follow each other.

    A number that a round names is either the same in all rounds or larger in each by as much. So where an analysis
    finds the state behind a round to be that before it, but for such numbers, all further rounds leave it so.

    Attributes:
        first: index of the first item of the first round.
        length: items of a round.
        count: rounds.
        shift: by how much a number is larger in the next round, where it is not the same.
    """

    first: int
    length: int
    count: int
    shift: int

    @property
    def stop(self) -> int:
        """Index behind the last item of the last round."""
        return self.first + self.length * self.count

    @property
    def behind_first(self) -> Rounds:
        """All but the first round."""
        return replace(self, first=self.first + self.length, count=self.count - 1)

    def moved(self, before: Mapping[int, V], now: Mapping[int, V], rounds: int) -> list[int] | None:
        """Return the numbers that moved between two equal states; None where the states differ.

        Args:
            before: what a state says of each number.
            now: of a later state.
            rounds: between the two.
        """
        if len(before) != len(now):
            return None
        found = []
        for number, value in now.items() - before.items():
            earlier = number - self.shift * rounds
            if earlier not in before or before[earlier] != value:
                return None
            found.append(number)
        return found
