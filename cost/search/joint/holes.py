"""Holes that determine memory, and the values from which their joint decision is composed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias

from legoai.cost.search.candidates import Choices
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.frontend.paths import pattern
from legoai.dsl.holes import OpenHole
from legoai.dsl.open_plan import OpenPlan
from legoai.specs.directives.checkpoint import Checkpoint
from legoai.specs.directives.fsdp import Fsdp
from legoai.specs.directives.loss import Loss
from legoai.specs.directives.mesh import DATA_AXES
from legoai.specs.directives.offload import Offload

_FEWEST_BLOCKS: Final = 2
"""Least number of blocks that can be treated differently."""

Kind: TypeAlias = int
"""0 for the treatment of `checkpoint`, 1 for that of `fsdp`, 2 for offloading."""

WrittenRule: TypeAlias = tuple[int | None, int | None, int]
"""Value of the first blocks, value of the others, and number of first blocks; 0 where all have the second."""


class Values(NamedTuple):
    """Indices of the values of the three holes; None for a hole that the plan does not have."""

    checkpoint: int | None
    fsdp: int | None
    offload: int | None


class Written(NamedTuple):
    """A joint solution in terms of the holes' values: one rule for the model's blocks, or one for each stage."""

    checkpoint: tuple[WrittenRule, ...]
    fsdp: tuple[WrittenRule, ...]
    offload: int | None


class MemoryHoles:
    """The holes of a plan that are decided jointly.

    Args:
        plan: the plan, with its holes.
    """

    def __init__(self, plan: OpenPlan) -> None:
        self.plan = plan
        self.holes = Values(*(_hole(plan, kind) for kind in (0, 1, 2)))

    @property
    def apply(self) -> bool:
        """Whether the plan has such holes: at least one for the blocks, and each of these for all of them."""
        blocks = [hole for hole in self.holes[:2] if hole is not None]
        return bool(blocks) and all(self._of_all_blocks(hole) for hole in blocks)

    @property
    def blocks(self) -> int:
        """Number of blocks of the model, which these holes are for."""
        assert self.plan.analysis is not None
        return len(_blocks_of(self.plan.analysis))

    def group(self, choices: Choices) -> Choices:
        """The choices of the other holes."""
        return tuple(None if index in self.holes else choice for index, choice in enumerate(choices))

    def share_blocks(self, group: Choices, other: Choices) -> bool:
        """Whether blocks compute and keep the same with two choices of the other holes.

        These differ in nothing but the form of the loss, and in how many of the data-parallel ranks share parameters.
        """
        pairs = zip(self.plan.holes, group, other, strict=True)
        return all(one == two or hole.owner is Loss or _is_of_replicas(hole) for hole, one, two in pairs)

    def is_rule_alone_open(self, choices: Choices) -> bool:
        """Whether the hole of `checkpoint` is the only one without a choice."""
        return [index for index, value in enumerate(choices) if value is None] == [self.holes.checkpoint]

    def values(self, choices: Choices) -> Values:
        """The values of the three holes in a candidate."""
        return Values(*(None if hole is None else choices[hole] for hole in self.holes))

    def chosen(self, group: Choices, values: Values) -> Choices:
        """The candidate with these values of the three holes and the choices of the other holes."""
        chosen = list(group)
        for hole, value in zip(self.holes, values, strict=True):
            if hole is not None:
                chosen[hole] = value
        return tuple(chosen)

    def are_listed(self, choices: Choices) -> bool:
        """Whether all three values are listed ones, so that all blocks have one treatment."""
        return all(
            hole is None or value in self.listed(kind)
            for kind, (hole, value) in enumerate(zip(self.holes, self.values(choices), strict=True))
        )

    def listed(self, kind: Kind) -> list[int]:
        """The listed values of a hole from which joint solutions are composed."""
        hole = self.holes[kind]
        if hole is None:
            return []
        known = self.plan.holes[hole]
        return [index for index in range(known.listed) if known.choices[index].startswith(_MADE_OF[kind])]

    def first(self, group: Choices) -> Choices:
        """The candidate with the first listed value of each of the three holes."""
        return self.chosen(group, Values(*(next(iter(self.listed(kind)), None) for kind in (0, 1, 2))))

    def around(self, own: Values) -> Iterator[Values]:
        """Yield the values that differ in at most one hole."""
        for kind in (0, 1, 2):
            for value in self.listed(kind):
                yield Values(*(value if place == kind else one for place, one in enumerate(own)))

    def value(self, kind: Kind, rules: tuple[WrittenRule, ...]) -> int | None:
        """The value of a hole for the rules of all blocks or of each stage; it is added to the plan where it is new."""
        hole, (_, high, some) = self.holes[kind], rules[0]
        if hole is None or high is None or (not some and all(rule == rules[0] for rule in rules)):
            return high
        texts = [self._text(hole, rule) for rule in rules]
        return self.plan.add(hole, texts[0] if len(texts) == 1 else f"stages([{', '.join(texts)}])")

    def _text(self, hole: int, rule: WrittenRule) -> str:
        texts, (low, high, some) = self.plan.holes[hole].choices, rule
        assert low is not None and high is not None
        if not some:
            return texts[high]
        others = "" if texts[high] == "none" else f", others = {texts[high]}"
        return f"first({some}, {texts[low]}{others})"

    def _of_all_blocks(self, hole: int) -> bool:
        """Whether the rule of a hole matches exactly the blocks of all of the model's block lists."""
        analysis, path = self.plan.analysis, self.plan.holes[hole].path
        if analysis is None or path is None:
            return False
        blocks = _blocks_of(analysis)
        return len(blocks) >= _FEWEST_BLOCKS and analysis.module_paths.matching(pattern(path)) == blocks


_OWNERS: Final = (Checkpoint, Fsdp, Offload)
_MADE_OF: Final = (("none", "full", "selective", "budget"), ("unit",), ("none", "all"))
"""Prefixes of the listed values from which joint solutions are composed, by kind."""


def divisible(plan: OpenPlan) -> frozenset[int]:
    """The holes of a plan for the treatment of several modules, which a value that is not listed may treat differently.

    A hole with a domain has the values of that only.
    """
    return frozenset(
        index
        for index, hole in enumerate(plan.holes)
        if hole.free and hole.owner in _OWNERS[:2] and hole.path is not None and _matches_several(plan, hole.path)
    )


def _matches_several(plan: OpenPlan, path: str) -> bool:
    return plan.analysis is None or len(plan.analysis.module_paths.matching(pattern(path))) >= _FEWEST_BLOCKS


def _blocks_of(analysis: Analysis) -> list[str]:
    """The blocks of all of a model's lists, in its order."""
    lists = () if analysis.manifest is None else analysis.manifest.block_lists
    return [block for item in lists if item.path for block in item.paths]


def _is_of_replicas(hole: OpenHole) -> bool:
    return hole.axis in DATA_AXES


def _hole(plan: OpenPlan, kind: Kind) -> int | None:
    """The only hole of a kind that has no domain; None where there is none, or several."""
    found = [
        index
        for index, hole in enumerate(plan.holes)
        if hole.free
        and hole.owner is _OWNERS[kind]
        and (hole.path is not None if kind < 2 else hole.option == "optimizer")
    ]
    return found[0] if len(found) == 1 else None
