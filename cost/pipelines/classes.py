"""Classes of a stage's actions: those of one class do the same, whatever their micro batch.

The first action of a kind in a pass is a class of its own, as it makes what others add to. Where parameters are freed
after a forward, what an action does depends on what stands before it on its stage too: behind a forward it gathers
them, and behind a backward it goes on with those that are there. So does what a backward finds depend on the class of
the forward of its micro batch.

Where backward is split and FSDP sums gradients in another type than they are computed in, gradients of weights wait
until a later action of the stage takes them into the sums: what an action does depends on whether some wait, on which
action made them, and on whether there are sums yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

Action: TypeAlias = tuple[int, str, int]
"""Stage, kind and micro batch. `L` is the loss, which is recorded as a part of the last stage's `F`."""

FIRST: Final = "first"
REST: Final = "rest"
GATHERS: Final = "gathers"
GOES_ON: Final = "goes on"
GOES_ON_WITH_FIRST: Final = "goes on with what the first gathered"
ADDS: Final = ", adds to gradients"
TAKES: Final = ", takes gradients of "
ADDS_TO_SUMS: Final = ", adds to sums"

Class: TypeAlias = tuple[str, ...]
"""That of an action by itself, and, behind it, that of the forward of its micro batch."""

Waiting: TypeAlias = tuple[str, str]
"""What gradients wait on a stage: the class of the action that made those that wait to be summed, and that of the one
that made the sums; empty for none."""


@dataclass(slots=True)
class Classes:
    """The classes of the actions of a pass, which are told in their order.

    Args:
        firsts: the micro batch with which each kind of action begins on each stage.
        freed: whether parameters are taken to be freed after each forward.
        summed: stages whose gradients of weights wait for a later action that sums them in another type.
    """

    firsts: Mapping[tuple[int, str], int]
    freed: bool
    summed: Collection[int] = ()
    found: dict[Action, Class] = field(default_factory=dict)
    _holder: dict[int, Action | None] = field(default_factory=dict)
    """By stage, the action that gathered the parameters that are there; None where they were freed."""
    _waiting: dict[int, Waiting] = field(default_factory=dict)

    def enter(self, action: Action) -> Class:
        """The class of the next action."""
        stage, kind, micro_batch = action
        forward = self.found.get((stage, "F", micro_batch), ())
        if kind == "L":
            return forward
        own = self._of_gradients(action) if stage in self.summed else self._own(action)
        self.found[action] = (own, *forward)
        return self.found[action]

    def holds(self, stage: int) -> bool:
        """Whether the parameters of a stage are there before its next action."""
        return self._holder.get(stage) is not None

    def waiting(self, stage: int) -> Waiting:
        """What gradients wait on a stage before its next action."""
        return self._waiting.get(stage, ("", ""))

    def leaves_gradients(self, action: Action) -> bool:
        """Whether what an action leaves where gradients wait matters to later ones."""
        return action[0] in self.summed and action[1] in ("B", "I", "W")

    def _of_gradients(self, action: Action) -> str:
        """The class of an action by itself on a stage whose gradients are summed in another type."""
        stage, kind, micro_batch = action
        own = FIRST if micro_batch == self.firsts[stage, kind] else REST
        gradients, sums = self.waiting(stage)
        whole = kind == "B" or (kind == "W" and not stage)  # torch does nothing for the input of the first stage
        if kind == "W" and not whole:
            own += ADDS if gradients else ""
            self._waiting[stage] = gradients or own, sums
        elif whole or (kind == "I" and stage and gradients):
            own += f"{TAKES}{gradients}" if gradients else ""
            own += ADDS_TO_SUMS if sums else ""
            self._waiting[stage] = "", sums or own
        return own

    def _own(self, action: Action) -> str:
        stage, kind, micro_batch = action
        first = micro_batch == self.firsts[stage, kind]
        if not self.freed or kind == "W":  # which needs no parameters
            return FIRST if first else REST
        holder = self._holder.get(stage)
        if kind == "F":
            self._holder[stage] = None
        elif holder is None:
            self._holder[stage] = action
        if first:
            return FIRST
        if holder is None:
            return GATHERS
        return GOES_ON_WITH_FIRST if holder[2] == self.firsts[holder[:2]] else GOES_ON


def first_micro_batches(actions: Iterable[Action]) -> dict[tuple[int, str], int]:
    """The micro batch with which each kind of action begins on each stage."""
    found: dict[tuple[int, str], int] = {}
    for stage, kind, micro_batch in actions:
        found.setdefault((stage, kind), micro_batch)
    return found
