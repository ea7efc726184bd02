"""Reader of a pipeline's order file, and checks that it can run.

The file is what PyTorch's schedules write (`_dump_csv`) and read (`_load_csv`): a line for each rank, a cell
for each step, a cell empty where the rank waits. A cell names a stage, an action and a micro batch: `2F0` is
the forward of micro batch 0 on stage 2. `F` is a forward, `B` a whole backward, `I` and `W` the gradients of
a stage's input and of its weights. A file may also hold the communication (`SEND_F`, `RECV_F`, `SEND_B`,
`RECV_B`, `UNSHARD`, `RESHARD`, `REDUCE_GRAD`); then it holds all of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

COMPUTE: Final = ("F", "B", "I", "W")
COMMUNICATION: Final = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
_ACTION = re.compile(r"(\d{1,9})(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B|F|I|B|W)(\d{1,9})?")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One thing that a rank does to one stage."""

    stage: int
    kind: str
    micro_batch: int | None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.micro_batch is None else self.micro_batch}"


Cell = tuple[Action, ...]
"""Content of one cell: nothing, one action, or the two that `OVERLAP_F_B` runs together."""


class OrderError(ValueError):
    """The file's text is no order of actions. ``line`` and ``column`` count lines and cells from 1."""

    def __init__(self, message: str, line: int, column: int) -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        self.column = column


@dataclass(frozen=True, slots=True)
class Order:
    """The cells of each rank, in the order of the file's lines."""

    ranks: tuple[tuple[Cell, ...], ...]

    @property
    def with_communication(self) -> bool:
        """Whether the file contains communication, or only computation."""
        return any(action.kind not in COMPUTE for action in self.actions())

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of inputs and weights are computed separately."""
        return any(action.kind in ("I", "W") for action in self.actions())

    @property
    def stages(self) -> int:
        """The number of stages that the file speaks of: the highest index and one."""
        return 1 + max((action.stage for action in self.actions()), default=-1)

    @property
    def micro_batches(self) -> int:
        """The number of micro batches that the file speaks of: the highest index and one."""
        indices = (action.micro_batch for action in self.actions() if action.micro_batch is not None)
        return 1 + max(indices, default=-1)

    def actions(self) -> Iterator[Action]:
        """Every action of every rank."""
        for cells in self.ranks:
            for cell in cells:
                yield from cell


def read_order(text: str) -> Order:
    """Read the text of an order file.

    Raises:
        OrderError: a cell is no action.
    """
    import csv
    import io

    ranks = []
    try:
        for line, row in enumerate(csv.reader(io.StringIO(text, newline=""), strict=True), 1):
            ranks.append(tuple(_cell(cell.strip(), line, column) for column, cell in enumerate(row, 1)))
    except csv.Error as error:
        raise OrderError(str(error), len(ranks) + 1, 1) from error
    if not any(cell for cells in ranks for cell in cells):
        raise OrderError("the file names no action", 1, 1)
    return Order(tuple(ranks))


def _cell(text: str, line: int, column: int) -> Cell:
    if not text:
        return ()
    overlap = _OVERLAP.fullmatch(text)
    parts = [part.strip() for part in overlap[1].split(";")] if overlap else [text]
    actions = []
    for part in parts:
        match = _ACTION.fullmatch(part)
        if match is None:
            raise OrderError(f"`{part[:40]}` is no action", line, column)
        action = Action(int(match[1]), match[2], None if match[3] is None else int(match[3]))
        if action.micro_batch is None and action.kind in COMPUTE + COMMUNICATION:
            raise OrderError(f"`{part}` names no micro batch", line, column)
        actions.append(action)
    if overlap and [action.kind for action in actions] not in (["F", "B"], ["B", "F"]):
        raise OrderError(f"`{text[:40]}` must overlap one forward with one backward", line, column)
    return tuple(actions)


def order_faults(order: Order, *, sharded: bool = False) -> Iterator[str]:
    """Yield why the order cannot run, or does not compute every gradient once; nothing where it is valid.

    These are the errors of torch's `_validate_schedule` and `_add_send_recv`, and duplicate actions. Where parameters
    are ``sharded``, an order that names communication must name all of it.
    """
    if order.with_communication and any(not cell for cells in order.ranks for cell in cells):
        yield "a file with communication in it cannot have empty cells"
        return
    counted = list(_miscounted(order))
    if sharded and order.with_communication:
        counted += _never_gathered(order)
    yield from counted
    fault = None if counted else _Run(order).fault()
    if fault is not None:
        yield fault


def _miscounted(order: Order) -> Iterator[str]:
    """Yield stages on two ranks, missing actions, and duplicate actions."""
    rank_of: dict[int, int] = {}
    seen: set[Action] = set()
    for rank, cells in enumerate(order.ranks):
        for action in (action for cell in cells for action in cell):
            if rank_of.setdefault(action.stage, rank) != rank:
                yield f"stage {action.stage} is on rank {rank_of[action.stage]} and, by `{action}`, on rank {rank}"
                return
            if action.kind in COMPUTE + COMMUNICATION and action in seen:
                yield f"`{action}` stands twice"
                return
            seen.add(action)
    for stage in range(order.stages):
        for index in range(order.micro_batches):
            kinds = "".join(kind for kind in COMPUTE if Action(stage, kind, index) in seen)
            if kinds not in ("FB", "FIW"):
                yield (
                    f"stage {stage} does {_kinds(kinds)} of micro batch {index}; it must do a forward (`F`) and either "
                    "a backward (`B`) or both of its parts (`I` and `W`)"
                )
                return


def _never_gathered(order: Order) -> list[str]:
    """Return the first stage whose parameters the order does not gather and free, or gradients not reduce."""
    named = {(action.stage, action.kind) for action in order.actions()}
    for stage in range(order.stages):
        for kind in ("UNSHARD", "REDUCE_GRAD", "RESHARD"):
            if (stage, kind) not in named:
                return [f"it names communication, and no `{stage}{kind}`, which `fsdp` needs"]
    return []


def _kinds(kinds: str) -> str:
    return " and ".join(f"`{kind}`" for kind in kinds) if kinds else "nothing"


class _Run:
    """Runs the ranks side by side, each in its own order, until all are done or all wait."""

    def __init__(self, order: Order) -> None:
        self.stages = order.stages
        self.explicit = order.with_communication
        self.rank_of = {
            action.stage: rank for rank, cells in enumerate(order.ranks) for cell in cells for action in cell
        }
        self.waiting = [[cell for cell in reversed(cells) if cell] for cells in order.ranks]
        self.done: set[Action] = set()

    def fault(self) -> str | None:
        """Return what the first blocked rank waits for; None where all ranks complete."""
        while any([self._advance(cells) for cells in self.waiting]):  # noqa: C419 - every rank moves
            pass
        blocked = [
            (rank, action, need)
            for rank, cells in enumerate(self.waiting)
            if cells
            for action in cells[-1]
            for need in self._open(action)
        ]
        if blocked:
            later = {action for cells in self.waiting for cell in cells for action in cell}
            # An action that never comes is the cause; where all come, the ranks wait for each other.
            rank, action, need = next((item for item in blocked if item[2] not in later), blocked[0])
            return f"rank {rank} waits for ever before `{action}`: `{need}` never comes before it"
        return None

    def _advance(self, cells: list[Cell]) -> bool:
        moved = False
        while cells and not any(True for action in cells[-1] for _ in self._open(action)):
            self.done.update(cells.pop())
            moved = True
        return moved

    def _open(self, action: Action) -> Iterator[Action]:
        """Return a predecessor of ``action`` that is not done."""
        return (need for need in self._needs(action) if need not in self.done)

    def _needs(self, action: Action) -> Iterator[Action]:
        stage, kind, index = action
        if kind == "W":
            yield Action(stage, "I", index)
        elif kind in ("B", "I"):
            yield Action(stage, "F", index)
            if stage + 1 < self.stages:
                yield from self._arrival(stage + 1, stage, "B", index)
        elif kind == "F" and stage > 0:
            yield from self._arrival(stage - 1, stage, "F", index)
        elif kind == "SEND_F":
            yield Action(stage, "F", index)
        elif kind == "SEND_B":
            yield self._backward(stage, index)

    def _arrival(self, source: int, stage: int, kind: str, index: int | None) -> Sequence[Action]:
        """Return the predecessor on the neighbour: its computation or, if communication is listed, send and receive."""
        if self.explicit and self.rank_of[source] != self.rank_of[stage]:
            return Action(source, f"SEND_{kind}", index), Action(stage, f"RECV_{kind}", index)
        return (Action(source, "F", index) if kind == "F" else self._backward(source, index),)

    def _backward(self, stage: int, index: int | None) -> Action:
        """Return the action that computes the gradient of the stage's input: its full backward, or the input half."""
        part = Action(stage, "I", index)
        return part if part in self.done else Action(stage, "B", index)
