"""Meetings: what several simulated ranks do together, which begins when the last of them is there."""

from __future__ import annotations

from typing import Final

from legoai.cost.timing.nodes import Meeting, Participant
from legoai.cost.trace.records import Collective

POINT_TO_POINT: Final = ("send", "receive")


class Meetings:
    """What simulated ranks do together.

    Attributes:
        ranks: those that are simulated.
        alone: whether there is one, which waits for no other.
        known: by what it is and how many like it were before.
        concerned: other ranks on which the one that goes on has just let something begin or end.
    """

    def __init__(self, ranks: frozenset[int], *, alone: bool) -> None:
        self.ranks, self.alone = ranks, alone
        self.known: dict[tuple[object, ...], Meeting] = {}
        self.concerned: list[Participant] = []

    def of(self, record: Collective, place: int) -> Meeting | None:
        """Return what the record is one side of; None where no other simulated rank takes part.

        Args:
            record: of one rank.
            place: how many like it the rank has issued before.
        """
        if record.kind in POINT_TO_POINT:
            missing = [rank for rank in record.ranks if rank not in self.ranks]
            if missing:
                raise ValueError(f"rank {missing[0]} sends or receives, and is not simulated")
            need, key = 2, ("between", record.ranks, place)
        else:
            need = sum(rank in self.ranks for rank in record.ranks)
            key = (record.kind, record.ranks, place)
        if need < 2:
            return None
        return self.known.setdefault(key, Meeting(need))
