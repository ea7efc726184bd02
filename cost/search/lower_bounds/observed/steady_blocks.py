"""Steady state of repeated blocks: seconds that each adds to a micro batch, communication beside it included.

Parameters are gathered and gradients reduced beside the blocks of a model: kernels run slower meanwhile, what is
gathered is copied, and a block may wait. In the steady state of a simulated step each block adds the same time to each
micro batch. As long as the links are idle at times during each block, no collective that one block begins is left for
the next but one. What a block adds then depends on its own treatment alone: a step with several treatments takes the
mean of the steps that have one of them each, weighted by their blocks. Blocks at the ends of a model differ, as they
run beside the collectives of other modules.

Other data-parallel degrees gather the same parameters over other ranks. A collective that is shorter by some time
shortens a step by no more than that.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from legoai.cost.composed import SteadyBlock, SteadyPass
from legoai.cost.machine.cluster import Machine
from legoai.cost.search.lower_bounds.communication.collectives import (
    GatheredUnits,
    gathered_units,
    seconds_of_collective,
    seconds_of_copies,
)
from legoai.cost.search.lower_bounds.observed.blocks import block_key, one_treatment, text_of
from legoai.cost.search.lower_bounds.shared_work import MicroBatchWork
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.batch import micro_batches
from legoai.specs.directives.base import describe
from legoai.specs.directives.hole import Undecided
from legoai.specs.plan import holes_of

_DECIDE: Final = ("fsdp", "replicate", "comm", "offload")
"""Statements that decide what is communicated beside blocks."""


class _Unit(NamedTuple):
    """Seconds in which a unit is gathered and reduced, and in which it is copied for these."""

    gather: float
    reduce: float
    copied_gathered: float
    copied_reduced: float


class Beside(NamedTuple):
    """Seconds in which units are gathered and reduced beside a block in a micro batch, and copied for that."""

    gathers: float = 0.0
    reduces: float = 0.0
    copies: float = 0.0

    def with_unit(self, unit: _Unit, gathers: int, reductions: int) -> Beside:
        """The same with one more unit that is gathered and reduced so often."""
        copies = gathers * unit.copied_gathered + reductions * unit.copied_reduced
        return Beside(
            self.gathers + gathers * unit.gather, self.reduces + reductions * unit.reduce, self.copies + copies
        )

    def delays(self, slowed: float) -> float:
        """Seconds by which all this delays a block that is slowed by a share of its communication."""
        return self.copies + (self.gathers + self.reduces) * slowed

    def shorter_than(self, collectives: Mapping[str, float]) -> float:
        """Seconds by which collectives of each kind take less here."""
        own = {"all_gather": self.gathers, "reduce_scatter": self.reduces}
        return sum(max(0.0, took - own.get(kind, 0.0)) for kind, took in collectives.items())


class SteadyTime(NamedTuple):
    """Seconds that a steady block adds to a micro batch at least, and what is gathered and reduced meanwhile."""

    seconds: float
    beside: Beside


@dataclass(slots=True)
class SteadyBlocks:
    """What steady blocks were observed to add in the candidates of one plan.

    Args:
        machine: of a candidate whose cluster is decided.
        room: bytes of active memory that a rank may take.

    Attributes:
        revisions: number of new observations, by the key of what blocks compute.
    """

    machine: Callable[[Analysis], Machine]
    room: Callable[[Analysis], float]
    revisions: Counter[str | None] = field(default_factory=Counter)
    _seen: dict[str, dict[str, SteadyBlock]] = field(default_factory=dict)

    def observe(self, analysis: Analysis, micro_batch: MicroBatchWork) -> bool:
        """Note what the blocks of a simulated candidate add, and say whether it is new."""
        steady, key, treatment = micro_batch.steady, self.key(analysis), one_treatment(analysis)
        if steady is None or key is None or treatment is None:
            return False
        known = self._seen.setdefault(key, {})
        if treatment in known:
            return False
        known[treatment] = steady
        self.revisions[block_key(analysis)] += 1
        return True

    def of(self, analysis: Analysis, treatment: Any) -> SteadyTime | None:
        """What a block under a treatment adds to a micro batch; None where none like it was observed."""
        seen = self._known(analysis).get(text_of(analysis, treatment))
        return None if seen is None else self._at_least(analysis, seen.everything)

    def in_forward(self, analysis: Analysis) -> SteadyTime | None:
        """What a block adds to the forward of a micro batch, which is the same under every treatment."""
        seen = next(iter(self._known(analysis).values()), None)
        return None if seen is None else self._at_least(analysis, seen.forward, forward=True)

    def _known(self, analysis: Analysis) -> Mapping[str, SteadyBlock]:
        key = self.key(analysis) if self.revisions[block_key(analysis)] else None
        return {} if key is None else self._seen.get(key, {})

    def _at_least(self, analysis: Analysis, seen: SteadyPass, *, forward: bool = False) -> SteadyTime:
        beside = analysis.once(
            ("units beside a block", self.machine(analysis).profile.hash), lambda: self._beside(analysis)
        )[0 if forward else 1]
        return SteadyTime(max(0.0, seen.seconds - beside.shorter_than(seen.collectives)), beside)

    def key(self, analysis: Analysis) -> str | None:
        """What decides what steady blocks add, beside their treatments; None where it is not decided, or not known."""
        return analysis.once(
            ("key of steady blocks", self.machine(analysis).profile.hash), lambda: _key(analysis, self.room(analysis))
        )

    def _beside(self, analysis: Analysis) -> tuple[Beside, Beside]:
        """What is gathered and reduced beside a block in the forward of a micro batch, and in all passes."""
        machine, batches = self.machine(analysis), micro_batches(analysis.plan) or 1
        forward = everything = Beside()
        for each in _units_of_blocks(analysis, self.room(analysis)):
            share = len(each.paths) / (batches * _blocks(analysis))
            gather = seconds_of_collective(analysis, machine, "all_gather", each.gathered)
            reduce = seconds_of_collective(analysis, machine, "reduce_scatter", each.reduced)
            copied = seconds_of_copies(analysis, machine, each.gathered, each.reduced)
            unit = _Unit(share * gather, share * reduce, share * copied[0], share * copied[1])
            forward = forward.with_unit(unit, min(each.gathers, batches), 0)
            everything = everything.with_unit(unit, each.gathers, each.reductions)
        return forward, everything


def _key(analysis: Analysis, room: float) -> str | None:
    """What decides what steady blocks add, beside their treatments and the speed of collectives.

    None where that is not decided, or not known: in a pipeline, and without FSDP.
    """
    plan, of_blocks = analysis.plan, block_key(analysis)
    statements = [one for name in _DECIDE if (one := getattr(plan, name)) is not None]
    if of_blocks is None or any(any(holes_of(one)) for one in statements):
        return None
    try:
        batches, units = micro_batches(plan), _units_of_blocks(analysis, room)
    except Undecided:
        return None
    if batches is None or not units:
        return None
    often = sorted((each.gathers / batches, each.reductions / batches) for each in units)
    return json.dumps([of_blocks, describe(statements), often], sort_keys=True)


def _units_of_blocks(analysis: Analysis, room: float) -> list[GatheredUnits]:
    assert analysis.manifest is not None
    return gathered_units(analysis, room, analysis.manifest.block_lists[0].path)


def _blocks(analysis: Analysis) -> int:
    assert analysis.manifest is not None
    return len(analysis.manifest.block_lists[0].paths)
