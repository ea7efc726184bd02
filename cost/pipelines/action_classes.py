"""Classes of a stage's actions: two actions of one class issue the same ops, whatever their micro batches.

The first action of a kind in a pass is a class of its own, because it allocates what later ones accumulate into. Where
parameters are resharded after forward, the class also depends on the action before it on the stage: after a forward an
action all-gathers the parameters, and after a backward it reuses unsharded ones. A backward also depends on the class
of the forward of its micro batch, whose saved tensors it reads.

Where backward is split and FSDP reduces gradients in another dtype than they are computed in, weight gradients wait
until a later action of the stage adds them to the sums. The class then also depends on whether gradients wait, on the
class of the action that computed them, and on whether sums exist.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

Action: TypeAlias = tuple[int, str, int]
"""Stage, kind and micro batch. `L` is the loss, which is recorded within the last stage's `F`."""

FIRST: Final = "first"
REST: Final = "rest"
GATHERS: Final = "gathers"
REUSES: Final = "reuses"
REUSES_FIRST: Final = "reuses what the first gathered"
ADDS: Final = ", adds to gradients"
TAKES: Final = ", takes gradients of "
ADDS_TO_SUMS: Final = ", adds to sums"

Class: TypeAlias = tuple[str, ...]
"""The class of the action on its own, followed by the class of its micro batch's forward."""

Waiting: TypeAlias = tuple[str, str]
"""The gradients that wait on a stage: the class of the action that computed those not yet added to the sums, and the
class of the action that made the sums; empty for none."""


@dataclass(slots=True)
class Classes:
    """Classification of the actions of a pass, which are entered in order.

    Args:
        firsts: the micro batch of the first action of each kind on each stage.
        freed: whether to assume that parameters are resharded after each forward.
        summed: stages whose weight gradients wait for a later action that sums them in another dtype.
    """

    firsts: Mapping[tuple[int, str], int]
    freed: bool
    summed: Collection[int] = ()
    found: dict[Action, Class] = field(default_factory=dict)
    _holder: dict[int, Action | None] = field(default_factory=dict)
    """By stage, the action that all-gathered the unsharded parameters; None where they are sharded."""
    _waiting: dict[int, Waiting] = field(default_factory=dict)

    def enter(self, action: Action) -> Class:
        """Return the class of the next action, and advance past it."""
        stage, kind, micro_batch = action
        forward = self.found.get((stage, "F", micro_batch), ())
        if kind == "L":
            return forward
        own = self._of_gradients(action) if stage in self.summed else self._own(action)
        self.found[action] = (own, *forward)
        return self.found[action]

    def holds(self, stage: int) -> bool:
        """Whether the parameters of a stage are unsharded before its next action."""
        return self._holder.get(stage) is not None

    def waiting(self, stage: int) -> Waiting:
        """The gradients that wait on a stage before its next action."""
        return self._waiting.get(stage, ("", ""))

    def leaves_gradients(self, action: Action) -> bool:
        """Whether later actions may read gradients that this action leaves."""
        return action[0] in self.summed and action[1] in ("B", "I", "W")

    def _of_gradients(self, action: Action) -> str:
        """Return the own class of an action on a stage whose gradients are summed in another dtype."""
        stage, kind, micro_batch = action
        own = FIRST if micro_batch == self.firsts[stage, kind] else REST
        gradients, sums = self.waiting(stage)
        whole = kind == "B" or (kind == "W" and not stage)  # the first stage has no I: its W is a full backward
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
        if not self.freed or kind == "W":  # W uses no parameters
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
        return REUSES_FIRST if holder[2] == self.firsts[holder[:2]] else REUSES


def first_micro_batches(actions: Iterable[Action]) -> dict[tuple[int, str], int]:
    """Return the micro batch of the first action of each kind on each stage."""
    found: dict[tuple[int, str], int] = {}
    for stage, kind, micro_batch in actions:
        found.setdefault((stage, kind), micro_batch)
    return found
