"""Meetings: joint operations of several simulated ranks, which begin when the last of them has arrived."""

from __future__ import annotations

from legoai.cost.timing.nodes import Meeting, Participant
from legoai.cost.trace.records import POINT_TO_POINT, Collective


class Meetings:
    """Joint operations of simulated ranks.

    Attributes:
        ranks: the simulated ranks.
        alone: whether there is only one, which waits for no other.
        known: by key and number of earlier ones with the same key.
        concerned: other ranks that the advancing rank has just affected.
    """

    def __init__(self, ranks: frozenset[int], *, alone: bool) -> None:
        self.ranks, self.alone = ranks, alone
        self.known: dict[tuple[object, ...], Meeting] = {}
        self.concerned: list[Participant] = []

    def of(self, record: Collective, place: int) -> Meeting | None:
        """Return the meeting of a record; None where no other simulated rank takes part.

        Args:
            record: of one rank.
            place: number of equal records that the rank has issued before.
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
