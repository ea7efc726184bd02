"""Options of a pipeline rank: time and memory of its stages under the rules of their blocks.

The blocks of a stage form a chain of pairs, as the blocks of a model without stages do
(:mod:`legoai.cost.search.memory.program`). Costs are differences from the reference pair.
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
    """Rules of the blocks of a stage."""

    checkpoint: Rule
    fsdp: Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePair:
    """Time and memory of the blocks of a pair in one stage, as differences from the reference pair.

    Attributes:
        seconds: difference in seconds per block and micro batch, by kind of action.
        besides: difference in seconds per block and step outside the actions.
        held: difference in bytes per block at the stage's peak, which is in one of its backwards.
        stays: bytes per block after its backward, less the bytes that a block of the reference pair holds before it.
        peak: peak of active bytes up to the backward of the last block, if all blocks of the stage have this pair and
            those of the rank's other stages have the reference pair.
        inside: peak of active bytes in the backward of the last block, extrapolated from the other blocks, likewise.
        beside: difference in bytes per block at the peak of another stage of the rank, by that stage.
        elsewhere: difference in bytes per block in the other actions.
        optimizer: difference in bytes per block while the optimizer runs.
        unused: bytes that the allocator reserves beyond the active ones.
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
        stage: index of the stage.
        blocks: number of blocks.
        pairs: costs of each pair; pairs that are missing are not chosen.
    """

    stage: Stage
    blocks: int
    pairs: Mapping[Pair, StagePair]

    def chain(self, rules: StageRules) -> list[tuple[StagePair, int]]:
        """Costs of the pairs in the model's order under some rules, each with its number of blocks."""
        return [(self.pairs[pair], count) for pair, count in chain(*rules, self.blocks)]

    def known(self, rules: StageRules) -> bool:
        """Whether the costs of all pairs that occur under some rules are known."""
        return all(pair in self.pairs for pair, _ in chain(*rules, self.blocks))

    def rules(self) -> Iterator[StageRules]:
        """All rules that a plan can write, with the treatment that holds less on the first blocks."""
        kinds = [sorted({pair[place] for pair in self.pairs}) for place in (0, 1)]
        lists: list[list[Rule]] = [
            [(one, one, 0) for one in known]
            + [(*two, some) for two in itertools.combinations(known, 2) for some in range(1, self.blocks)]
            for known in kinds
        ]
        every = (StageRules(*two) for two in itertools.product(*lists))
        return (rules for rules in every if self.known(rules))

    def option(self, rules: StageRules) -> StageOption:
        """Costs of the stage under some rules."""
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
        """Yield the bytes that may be the peak of the stage's own backward.

        These are its start, which includes the stage's last block, and the first and the last block of each pair: where
        parameters stay unsharded, memory grows from block to block.
        """
        last = found[-1][0]
        yield last.peak + sum(count * (one.held - last.held) for one, count in found)
        for place, (own, count) in enumerate(found):
            before = sum(number * (one.held - own.held) for one, number in found[:place])
            after = sum(number * (one.stays - own.held) for one, number in found[place + 1 :])
            ends = {0, count - 1} if place < len(found) - 1 else {0, count - 2} if count > 1 else set()
            for end in ends:
                yield own.inside + before + after + (count - 1 - end) * (own.stays - own.held)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOption:
    """Time and memory of a stage under some rules.

    Attributes:
        rules: rules of its blocks.
        seconds: difference in seconds per micro batch from the observed ones, by kind of action.
        besides: difference in seconds per step outside the actions.
        own: active bytes at the peak of its own backward, if the rank's other stages are as observed.
        beside: difference in bytes at the peak of another stage of the rank, by that stage.
        elsewhere: difference in bytes in the other actions.
        optimizer: difference in bytes while the optimizer runs.
        unused: bytes that the allocator reserves beyond the active ones.
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
    """The stages of a rank, and its memory limits.

    Attributes:
        stages: the stages of the rank.
        elsewhere: observed bytes in the other actions; 0 where these never are the peak.
        optimizer: observed bytes while the optimizer runs.
        offloadings: bytes of each value of `offload`; their seconds are kept with the step.
        active: limit of active memory, in bytes.
        reserved: limit of the bytes that the allocator reserves.
    """

    stages: Sequence[StageBlocks]
    elsewhere: float
    optimizer: float
    offloadings: Sequence[Offloading]
    active: float
    reserved: float

    def taken(self, options: Sequence[StageOption], way: int) -> tuple[float, float]:
        """Peak of active bytes, and the bytes that the allocator reserves beyond them."""
        offloading = self.offloadings[way]
        needed = [self.optimizer + sum(one.optimizer for one in options) + offloading.optimizer]
        for own, stage in zip(options, self.stages, strict=True):
            others = sum(other.beside.get(stage.stage, 0.0) for other in options if other is not own)
            needed.append(own.own + others + offloading.bytes)
        if self.elsewhere:
            needed.append(self.elsewhere + sum(one.elsewhere for one in options) + offloading.bytes)
        return max(needed), max(offloading.unused, *(one.unused for one in options))

    def excess(self, options: Sequence[StageOption], way: int) -> float:
        """Bytes by which the rank exceeds its limit, active or reserved; at most 0 where it fits."""
        most, unused = self.taken(options, way)
        return max(most - self.active, most + unused - self.reserved)

    def listed(self, way: int) -> list[tuple[StageOption, ...]]:
        """The combinations of the stages' options that fit and are not dominated in time in every kind of action.

        Dominated options of one stage are dropped before the options of stages are combined.
        """
        sized = len(self.stages) > 1
        each = [_best([stage.option(rules) for rules in stage.rules()], sized=sized) for stage in self.stages]
        fitting = [options for options in itertools.product(*each) if self.excess(options, way) <= 0.0]
        rows = [[value for one in options for value in times_of(one)] for options in fitting]
        return [fitting[place] for place in _front(rows)]


def times_of(option: StageOption) -> list[float]:
    """Seconds of an option in every kind of action, and outside the actions."""
    return [*option.seconds.values(), option.besides]


def _best(options: list[StageOption], *, sized: bool) -> list[StageOption]:
    """Options that no other dominates in time and bytes; all of them where the rank has one stage."""
    if not sized:
        return options
    rows = [
        [*times_of(one), one.own, *one.beside.values(), one.elsewhere, one.optimizer, one.unused] for one in options
    ]  # fmt: skip
    return [options[place] for place in _front(rows)]


def _front(rows: Sequence[Sequence[float]]) -> list[int]:
    """Pareto front: indices of the rows that no other row dominates; of equal rows the first."""
    if not rows:
        return []
    values = np.asarray(rows, dtype=np.float64)
    kept: list[int] = []
    held = np.empty_like(values)
    # In the order of the sums, no row is dominated by a later one.
    for place in np.lexsort((np.arange(len(values)), values.sum(axis=1))):
        if not kept or not bool(np.any(np.all(held[: len(kept)] <= values[place], axis=1))):
            held[len(kept)] = values[place]
            kept.append(int(place))
    return sorted(kept)
