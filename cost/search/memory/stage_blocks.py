"""Options of a pipeline rank: time and memory of its stages under the rules of their blocks.

The blocks of a stage are a chain of pairs, as those of a model without stages are
(:mod:`legoai.cost.search.memory.program`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from legoai.cost.search.memory.program import Offloading, Pair, Rule, chain

Stage: TypeAlias = int


class StageRules(NamedTuple):
    """How the blocks of a stage are treated."""

    checkpoint: Rule
    fsdp: Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePair:
    """What blocks of a pair take in a stage.

    Attributes:
        seconds: of a block for a micro batch by kind of action, above those of a block of some other pair.
        besides: seconds of a block in a step beside the actions, above those of a block of that pair.
        held: bytes of a block when the stage's backward finds most, above those of a block of that pair.
        stays: bytes behind its backward, likewise above what that pair holds before it.
        peak: active bytes up to the backward of the last block if all blocks of the stage are of this pair, and those
            of the rank's other stages of that pair.
        inside: likewise in the backward of the last block as it would be if it were one of the others.
        beside: bytes of a block when another stage's backward finds most, likewise above that pair, by that stage.
        elsewhere: bytes of a block in other actions, likewise.
        optimizer: bytes of a block while the optimizer runs, likewise.
        unused: bytes that the allocator reserves beyond what is active.
    """

    seconds: Mapping[str, float]
    besides: float = 0.0
    held: float = 0.0
    stays: float = 0.0
    peak: float = 0.0
    inside: float = 0.0
    beside: Mapping[Stage, float] = field(default_factory=dict)
    elsewhere: float = 0.0
    optimizer: float = 0.0
    unused: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBlocks:
    """The blocks of a stage.

    Attributes:
        stage: which.
        blocks: their number.
        pairs: what each pair takes; pairs that are missing are not chosen.
    """

    stage: Stage
    blocks: int
    pairs: Mapping[Pair, StagePair]

    def chain(self, rules: StageRules) -> list[tuple[StagePair, int]]:
        """What blocks take in the model's order under some rules, with their numbers."""
        return [(self.pairs[pair], count) for pair, count in chain(*rules, self.blocks)]

    def known(self, rules: StageRules) -> bool:
        """Whether all pairs are there of which blocks would be."""
        return all(pair in self.pairs for pair, _ in chain(*rules, self.blocks))

    def rules(self) -> Iterator[StageRules]:
        """All rules that a plan can write, with what holds less in front."""
        kinds = [sorted({pair[place] for pair in self.pairs}) for place in (0, 1)]
        lists: list[list[Rule]] = [
            [(one, one, 0) for one in known]
            + [(*two, some) for two in itertools.combinations(known, 2) for some in range(1, self.blocks)]
            for known in kinds
        ]
        every = (StageRules(*two) for two in itertools.product(*lists))
        return (rules for rules in every if self.known(rules))

    def option(self, rules: StageRules) -> StageOption:
        """What the stage takes under some rules."""
        found = self.chain(rules)
        kinds = sorted({kind for one, _ in found for kind in one.seconds})
        moments = sorted({moment for one, _ in found for moment in one.beside})
        return StageOption(
            rules=rules,
            seconds={kind: sum(count * one.seconds.get(kind, 0.0) for one, count in found) for kind in kinds},
            besides=sum(count * one.besides for one, count in found),
            own=max(self._needed(found)),
            beside={moment: sum(count * one.beside.get(moment, 0.0) for one, count in found) for moment in moments},
            elsewhere=sum(count * one.elsewhere for one, count in found),
            optimizer=sum(count * one.optimizer for one, count in found),
            unused=max(one.unused for one, _ in found),
        )

    def _needed(self, found: Sequence[tuple[StagePair, int]]) -> Iterator[float]:
        """Bytes in the stage's own backward: at the turn, and in the first and the last block of each pair.

        The last block of all is at the turn. Where parameters stay gathered, memory grows from block to block.
        """
        last = found[-1][0]
        yield last.peak + sum(count * (one.held - last.held) for one, count in found)
        for place, (own, count) in enumerate(found):
            before = sum(number * (one.held - own.held) for one, number in found[:place])
            behind = sum(number * (one.stays - own.held) for one, number in found[place + 1 :])
            ends = {0, count - 1} if place < len(found) - 1 else {0, count - 2} if count > 1 else set()
            for end in ends:
                yield own.inside + before + behind + (count - 1 - end) * (own.stays - own.held)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOption:
    """What a stage takes under some rules.

    Attributes:
        rules: of its blocks.
        seconds: for a micro batch by kind of action, above those that it was observed to take.
        besides: seconds of a step beside the actions, likewise.
        own: bytes in its own backward, if the rank's other stages are as they were observed.
        beside: bytes in that of another stage, above those that it was observed to take.
        elsewhere: likewise in other actions.
        optimizer: likewise in the optimizer.
        unused: bytes that the allocator reserves beyond what is active.
    """

    rules: StageRules
    seconds: Mapping[str, float]
    besides: float
    own: float
    beside: Mapping[Stage, float]
    elsewhere: float
    optimizer: float
    unused: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The stages of a rank, and its room.

    Attributes:
        stages: that it holds.
        elsewhere: bytes in other actions as they were observed; 0 where these matter nowhere.
        optimizer: bytes in the optimizer as they were observed.
        offloadings: bytes of each way to offload; its seconds are of the step.
        active: bytes of active memory that the rank may have.
        reserved: bytes that its allocator may reserve.
    """

    stages: Sequence[StageBlocks]
    elsewhere: float
    optimizer: float
    offloadings: Sequence[Offloading]
    active: float
    reserved: float

    def taken(self, options: Sequence[StageOption], way: int) -> tuple[float, float]:
        """Bytes that are active where most are, and those that the allocator reserves beyond them."""
        offloading = self.offloadings[way]
        needed = [self.optimizer + sum(one.optimizer for one in options) + offloading.optimizer]
        for own, stage in zip(options, self.stages, strict=True):
            others = sum(other.beside.get(stage.stage, 0.0) for other in options if other is not own)
            needed.append(own.own + others + offloading.bytes)
        if self.elsewhere:
            needed.append(self.elsewhere + sum(one.elsewhere for one in options) + offloading.bytes)
        return max(needed), max(offloading.unused, *(one.unused for one in options))

    def excess(self, options: Sequence[StageOption], way: int) -> float:
        """Bytes beyond the room; at most 0 where the rank has it."""
        most, unused = self.taken(options, way)
        return max(most - self.active, most + unused - self.reserved)

    def listed(self, way: int) -> list[tuple[StageOption, ...]]:
        """What the rank could do and has room for, without what takes no less time than something else in any action.

        A stage's options are left out before they are joined where another takes no more of anything.
        """
        sized = len(self.stages) > 1
        each = [_best([stage.option(rules) for rules in stage.rules()], sized=sized) for stage in self.stages]
        fitting = [options for options in itertools.product(*each) if self.excess(options, way) <= 0.0]
        rows = [[value for one in options for value in times_of(one)] for options in fitting]
        return [fitting[place] for place in _front(rows)]


def times_of(option: StageOption) -> list[float]:
    """Its seconds in every kind of action, and beside them."""
    return [*option.seconds.values(), option.besides]


def _best(options: list[StageOption], *, sized: bool) -> list[StageOption]:
    """Options than which none takes less of everything; all of them unless their bytes are to be joined with others."""
    if not sized:
        return options
    rows = [
        [*times_of(one), one.own, *one.beside.values(), one.elsewhere, one.optimizer, one.unused] for one in options
    ]  # fmt: skip
    return [options[place] for place in _front(rows)]


def _front(rows: Sequence[Sequence[float]]) -> list[int]:
    """The rows than which no other is at most as large everywhere; of equal ones the first."""
    if not rows:
        return []
    values = np.asarray(rows, dtype=np.float64)
    kept: list[int] = []
    held = np.empty_like(values)
    # What comes later in this order is nowhere less than what comes before.
    for place in np.lexsort((np.arange(len(values)), values.sum(axis=1))):
        if not kept or not bool(np.any(np.all(held[: len(kept)] <= values[place], axis=1))):
            held[len(kept)] = values[place]
            kept.append(int(place))
    return sorted(kept)
