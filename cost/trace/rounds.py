"""Rounds of a trace: consecutive micro batches that are equal apart from the numbers that each defines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Equal micro batches that follow each other.

    A number that a round uses is either the same in all rounds or increases by ``shift`` with each round. If an
    analysis finds the same state before and after a round, apart from such numbers, all further rounds preserve the
    state too.

    Attributes:
        first: index of the first item of the first round.
        length: items of a round.
        count: rounds.
        shift: increase of a number with the next round, where it is not the same.
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
        """All rounds but the first."""
        return replace(self, first=self.first + self.length, count=self.count - 1)

    def moved(self, before: Mapping[int, V], now: Mapping[int, V], rounds: int) -> list[int] | None:
        """Return the numbers that moved between two equal states; None where the states differ.

        Args:
            before: a state, by number.
            now: a later state, by number.
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
