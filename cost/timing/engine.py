"""Event simulation of ranks: hosts, streams, and the resources that streams share.

The semantics are those of section 4.6 of the LegoAI dissertation (Algorithms 1 to 6, Table 4.6): a stream runs its
operations in order, waits release when what they name is complete, and an operation needs its resource. Here the
simulation is driven by events: time advances from one completion to the next, and only nodes that a completion releases
are examined, whereas the dissertation's loop scans all queues.

There are seven additions:

- The host dispatches operations one after another, each of which takes host time, so that a stream of small kernels
  runs at the host's pace.
- A collective runs on its communicator's own queue and not on the calling stream, as NCCL's do
  (:mod:`legoai.cost.timing.dependencies`).
- Links are full-duplex: on one rank a send and a receive run at the same time, as in the batches of a pipeline; two
  sends, and a collective and anything else on its links, run one after the other.
- Of the operations that need one resource, the one that has been ready longest runs first, whichever the host issued
  first: when a kernel ends, the next one of its stream becomes ready only then, and a copy of another stream that waits
  since its event runs before it, as on a GPU.
- While a collective runs, overlapping computation is slower, because the collective occupies multiprocessors.
- Joint operations of several simulated ranks (sends and receives, and collectives whose group holds more than one of
  them) begin when the last rank has arrived, and end on all ranks when they end on the last. Until they begin, they
  block their queues, and occupy no resource.
- Kernels whose individual times are not needed are simulated together (:mod:`legoai.cost.timing.runs`).

Each rank has few possible next events: an operation ends on one of its resources, or its host issues the next one.
The rank with the earliest event advances until another rank has an earlier one, or until it affects another rank. A
rank alone advances to its end.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence

from legoai.cost.timing.meetings import Meetings
from legoai.cost.timing.nodes import NEVER
from legoai.cost.timing.operations import Operation, operations_of
from legoai.cost.timing.rank import Rank
from legoai.cost.timing.rank_timeline import ActionOp, RankTimeline, StandstillError
from legoai.cost.timing.timeline import Cost, Host, Timed, Timeline
from legoai.cost.trace.garbage import uncollected
from legoai.cost.trace.segments import Item
from legoai.cost.trace.trace import Trace


def simulate(trace: Trace, cost: Callable[[Timed], Cost], host: Host, *, by_run: bool = False) -> Timeline:
    """Run the operations of one rank that represents all: its communication begins as soon as it arrives.

    Args:
        trace: of the rank.
        cost: of an operation when nothing runs beside it.
        host: of the rank.
        by_run: whether consecutive kernels of a segment are simulated as one interval, with the record of the first
            (:mod:`legoai.cost.timing.runs`). Marks of modules are left out.

    Raises:
        ValueError: the trace waits for work that it never started.
    """
    with uncollected():
        operations = operations_of(trace.items, trace.translation, by_run=by_run)
        found = _Simulation({trace.rank: operations}, cost, host, alone=True).run()
    return found[trace.rank].timeline


def simulate_ranks(
    ranks: Mapping[int, Sequence[Item | ActionOp]], cost: Callable[[Timed], Cost], host: Host
) -> dict[int, RankTimeline]:
    """Run the operations of several ranks that wait for each other.

    Sends and receives between two ranks run in the order in which they are issued, as NCCL keeps a queue for each pair;
    a batch of them is one operation of the group's own queue (`torch.distributed.batch_isend_irecv`).

    Args:
        ranks: items of each rank, by global rank.
        cost: of an operation when nothing runs beside it.
        host: of every rank.

    Raises:
        StandstillError: the ranks wait for each other.
        ValueError: a rank waits for work that it never started, or sends to a rank that is not simulated.
    """
    operations = {rank: operations_of(items, None) for rank, items in ranks.items()}
    return _Simulation(operations, cost, host, alone=False).run()


class _Simulation:
    """Ranks that run at the same time."""

    def __init__(
        self,
        ranks: Mapping[int, Iterator[tuple[Operation, int]]],
        cost: Callable[[Timed], Cost],
        host: Host,
        *,
        alone: bool,
    ) -> None:
        self.meetings = Meetings(frozenset(ranks), alone=alone)
        self.ranks = {
            number: Rank(number, operations, cost, host, self.meetings) for number, operations in ranks.items()
        }
        self.upcoming: list[tuple[float, int, int, Rank]] = []
        """Times of the ranks' next events, with rank and turn; entries of earlier turns are stale."""

    def run(self) -> dict[int, RankTimeline]:
        """Run all ranks to their end."""
        for rank in self.ranks.values():
            rank.begin()
            self._expect(rank)
        upcoming, concerned = self.upcoming, self.meetings.concerned
        while upcoming:
            when, _, turn, rank = heapq.heappop(upcoming)
            if turn != rank.turn or when == NEVER:
                continue
            rank.advance(upcoming[0][0] if upcoming else NEVER)
            self._expect(rank)
            while concerned:
                self._expect(self.ranks[concerned.pop().number])
        stuck = [rank.stuck() for rank in self.ranks.values() if not rank.complete]
        if stuck:
            raise StandstillError("the ranks of the pipeline wait for each other: " + "; ".join(stuck))
        return {number: rank.result() for number, rank in self.ranks.items()}

    def _expect(self, rank: Rank) -> None:
        """Enter the time of a rank's next event."""
        rank.turn += 1
        heapq.heappush(self.upcoming, (rank.upcoming(), rank.number, rank.turn, rank))
