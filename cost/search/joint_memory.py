"""Joint answers of the holes that decide memory: learnt from simulations, solved for, simulated and learnt anew.

A hole without a domain for the treatment of all blocks, in `checkpoint` and in `fsdp`, and one for offloading the
optimizer's state, are answered by listed values first, one for all blocks. What these were seen to take gives a
:class:`~legoai.cost.search.memory.program.MemoryProblem`, whose answers treat the first of the blocks otherwise than
the others. They are simulated whole; what they take more or less than was expected corrects the room, until the answer
stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Final, NamedTuple, TypeAlias

from legoai.cost.search.candidates import Choices, Evaluated
from legoai.cost.search.evaluator import Figures
from legoai.cost.search.memory.program import Division, MemoryProblem, Offloading, Pair, PairCosts
from legoai.cost.search.stages.costs import Room
from legoai.dsl.frontend.paths import pattern
from legoai.dsl.open_plan import OpenPlan
from legoai.specs.directives.checkpoint import Checkpoint
from legoai.specs.directives.fsdp import Fsdp
from legoai.specs.directives.offload import Offload

MOST_ROUNDS: Final = 6
"""Programs that are solved for one way to answer the other holes."""
_FEWEST_BLOCKS: Final = 6
"""Fewer are not told apart in a trace."""

_Kind: TypeAlias = int
"""0 for the treatment of `checkpoint`, 1 for that of `fsdp`, 2 for offloading."""


WrittenRule: TypeAlias = tuple[int | None, int | None, int]
"""Values of the first blocks and of the others, and how many are the first."""


class Values(NamedTuple):
    """Indices of the values that the three holes have; None of a hole that the plan has not."""

    checkpoint: int | None
    fsdp: int | None
    offload: int | None


class Written(NamedTuple):
    """A joint answer in the values of the three holes."""

    checkpoint: WrittenRule
    fsdp: WrittenRule
    offload: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A joint answer.

    Attributes:
        choices: for each hole of the plan.
        predicted: seconds of a step, as the program has them.
        found: its figures, where it could be simulated.
    """

    choices: Choices
    predicted: float
    found: Evaluated | None = None


@dataclass(slots=True, kw_only=True)
class JointAnswers:
    """Joint answers beside one way to answer the other holes.

    Attributes:
        programs: that were solved.
        program: the last answer of the program.
        greedy: the last greedy answer; None where it found none.
        asked: candidates that were asked for.
        written: of each joint answer what it says of the blocks.
    """

    programs: int = 0
    program: Tried | None = None
    greedy: Tried | None = None
    asked: set[Choices] = field(default_factory=set)
    written: dict[Choices, Written] = field(default_factory=dict)


class JointMemory:
    """The holes of a plan that are answered jointly.

    Args:
        plan: with its holes.
    """

    def __init__(self, plan: OpenPlan) -> None:
        self.plan = plan
        self.holes = Values(*(_hole(plan, kind) for kind in (0, 1, 2)))
        self.answers: dict[Choices, JointAnswers] = {}

    @property
    def applies(self) -> bool:
        """Whether the plan has such holes, one for the blocks at least, and no pipeline, whose ranks differ."""
        analysis = self.plan.analysis
        blocks = [hole for hole in self.holes[:2] if hole is not None]
        return (
            analysis is not None
            and analysis.plan.pipeline is None
            and bool(blocks)
            and all(self._of_all_blocks(hole) for hole in blocks)
        )

    def group(self, choices: Choices) -> Choices:
        """The answers of the other holes."""
        return tuple(None if index in self.holes else choice for index, choice in enumerate(choices))

    def wanted(self, group: Choices, evaluated: Sequence[Evaluated], room: Room) -> list[Choices]:
        """What to evaluate next beside the answers of the other holes; nothing where nothing is left to be learnt.

        Args:
            group: the answers of the other holes.
            evaluated: the candidates with these, in the order in which they were evaluated.
            room: bytes that a rank may take.

        Raises:
            SolverMissingError: no solver is installed.
            SolverFailedError: it ended without an answer.
        """
        state = self.answers.setdefault(group, JointAnswers())
        known = {item.choices: item for item in evaluated}
        self._note(state, known)
        learnt = {self.values(item.choices): item.figures for item in evaluated}
        alike = [item for item in evaluated if item.figures.points.blocks and self._listed(item)]
        if not alike:
            return []
        best = min(
            alike,
            key=lambda item: (not item.feasible, item.figures.step_time if item.feasible else item.figures.reserved),
        )
        own = self.values(best.choices)
        probes = [self.chosen(group, one) for one in self._around(own) if one not in learnt]
        probes = [one for one in probes if one not in state.asked]
        if probes or state.programs >= MOST_ROUNDS:
            state.asked.update(probes)
            return probes
        return self._solve(state, group, known, Learnt(self, own, learnt), room)

    def _solve(
        self, state: JointAnswers, group: Choices, known: Mapping[Choices, Evaluated], learnt: Learnt, room: Room
    ) -> list[Choices]:
        problem = learnt.problem(room)
        last = None if state.program is None else known.get(state.program.choices)
        if last is not None:
            division = learnt.division(state.written[last.choices])
            problem = problem.corrected(division, last.figures.active, last.figures.reserved)
        state.programs += 1

        def tried(division: Division | None) -> Tried | None:
            if division is None:
                return None
            written = learnt.written(division)
            choices = self.chosen(group, learnt.values(written))
            state.written[choices] = written
            seconds = problem.seconds + problem.time(division)
            return Tried(choices=choices, predicted=seconds, found=known.get(choices))

        state.program, state.greedy = tried(problem.solve().division), tried(problem.greedy())
        asked: list[Choices] = []
        for one in (state.program, state.greedy):
            if one is not None:
                pairs = dict(problem.chain(learnt.division(state.written[one.choices])))
                beside = [learnt.uniform(pair) for pair in pairs if learnt.uniform(pair) not in learnt.every]
                asked += [one.choices, *(self.chosen(group, values) for values in beside)]
        new = [choices for choices in dict.fromkeys(asked) if choices not in known and choices not in state.asked]
        state.asked.update(new)
        return new

    def _note(self, state: JointAnswers, known: Mapping[Choices, Evaluated]) -> None:
        """Note what the last answers were seen to take."""
        if state.program is not None:
            state.program = replace(state.program, found=known.get(state.program.choices))
        if state.greedy is not None:
            state.greedy = replace(state.greedy, found=known.get(state.greedy.choices))

    def values(self, choices: Choices) -> Values:
        """The values of the three holes in a candidate."""
        return Values(*(None if hole is None else choices[hole] for hole in self.holes))

    def chosen(self, group: Choices, values: Values) -> Choices:
        """The candidate that some values of the three holes make of the answers of the others."""
        chosen = list(group)
        for hole, value in zip(self.holes, values, strict=True):
            if hole is not None:
                chosen[hole] = value
        return tuple(chosen)

    def _listed(self, item: Evaluated) -> bool:
        """Whether all blocks are treated alike."""
        return all(
            hole is None or value in self.listed(kind)
            for kind, (hole, value) in enumerate(zip(self.holes, self.values(item.choices), strict=True))
        )

    def listed(self, kind: _Kind) -> list[int]:
        """The values of a hole that a joint answer is made of."""
        hole = self.holes[kind]
        if hole is None:
            return []
        known = self.plan.holes[hole]
        return [index for index in range(known.listed) if known.choices[index].startswith(_MADE_OF[kind])]

    def _around(self, own: Values) -> Iterator[Values]:
        """The values of which one differs."""
        for kind in (0, 1, 2):
            for value in self.listed(kind):
                yield Values(*(value if place == kind else one for place, one in enumerate(own)))

    def _of_all_blocks(self, hole: int) -> bool:
        """Whether the rule of a hole is that of all blocks of the one list that the model has."""
        analysis, path = self.plan.analysis, self.plan.holes[hole].path
        if analysis is None or analysis.manifest is None or path is None:
            return False
        lists = [item for item in analysis.manifest.block_lists if item.path]
        if len(lists) != 1 or len(lists[0]) < _FEWEST_BLOCKS:
            return False
        return analysis.module_paths.matching(pattern(path)) == [f"{lists[0].path}.{name}" for name in lists[0].names]


_OWNERS: Final = (Checkpoint, Fsdp, Offload)
_MADE_OF: Final = (("none", "full", "selective", "budget"), ("unit",), ("none", "all"))
"""How the listed values begin that a joint answer is made of."""


def _hole(plan: OpenPlan, kind: _Kind) -> int | None:
    """The one hole without a domain of a kind; None where there is none, or several."""
    found = [
        index
        for index, hole in enumerate(plan.holes)
        if hole.free
        and hole.owner is _OWNERS[kind]
        and (hole.path is not None if kind < 2 else hole.what == "offload optimizer")
    ]
    return found[0] if len(found) == 1 else None


class Learnt:
    """What listed values of the holes were seen to take.

    Args:
        joint: the holes.
        own: values with which others are compared.
        figures: by the values of the three holes.
    """

    def __init__(self, joint: JointMemory, own: Values, figures: Mapping[Values, Figures]) -> None:
        self.joint = joint
        self.own = own
        self.every = figures
        self.figures = {values: one for values, one in figures.items() if one.points.blocks}
        self.base = figures[own]
        self.blocks = self.base.points.blocks
        self.kinds = [self._ordered(kind) for kind in (0, 1)]
        self.ways: list[int | None] = [one for one in joint.listed(2) if own._replace(offload=one) in figures]
        self.ways = self.ways or [own.offload]

    def _own_or(self, kind: _Kind, value: int | None) -> Values:
        """The own values, but for one hole."""
        return Values(*(value if place == kind else one for place, one in enumerate(self.own)))

    def _ordered(self, kind: _Kind) -> list[int | None]:
        """The values of a hole that were simulated, in the order of the bytes that blocks hold."""
        known: list[int | None] = [one for one in self.joint.listed(kind) if self._own_or(kind, one) in self.figures]
        if not known:
            return [self.own[kind]]

        def size(one: int | None) -> tuple[float, float, int]:
            costs = self._costs(self.figures[self._own_or(kind, one)])
            return costs.held, costs.stays, one or 0

        return sorted(known, key=size)

    def _costs(self, figures: Figures) -> PairCosts:
        points, base = figures.points, self.base.points
        stay = (points.optimizer - base.optimizer) / self.blocks
        return PairCosts(
            seconds=(figures.step_time - self.base.step_time) / self.blocks,
            held=points.released + stay - base.released,
            stays=stay - base.released,
            peak=points.peak,
            inside=points.inside,
            optimizer=points.optimizer,
            unused=figures.reserved - figures.active,
        )

    def uniform(self, pair: Pair) -> Values:
        """The values under which all blocks are of a pair."""
        return self.own._replace(checkpoint=self.kinds[0][pair[0]], fsdp=self.kinds[1][pair[1]])

    def problem(self, room: Room) -> MemoryProblem:
        """The problem; what was not simulated together takes what each of the two was seen to add."""
        base = self._costs(self.base)
        pairs: dict[Pair, PairCosts] = {}
        for first, one in enumerate(self.kinds[0]):
            for second, other in enumerate(self.kinds[1]):
                found = self.figures.get(self.uniform((first, second)))
                if found is not None:
                    pairs[first, second] = self._costs(found)
                    continue
                left = self._costs(self.figures[self.own._replace(checkpoint=one)])
                right = self._costs(self.figures[self.own._replace(fsdp=other)])
                pairs[first, second] = _added(left, right, base)
        offloadings = []
        for way in self.ways:
            figures = self.every[self.own._replace(offload=way)]
            offloadings.append(
                Offloading(
                    figures.step_time - self.base.step_time,
                    figures.active - self.base.active,
                    figures.points.optimizer - self.base.points.optimizer,
                    0.0 if way == self.own.offload else figures.reserved - figures.active,
                )
            )
        return MemoryProblem(
            blocks=self.blocks,
            pairs=pairs,
            offloadings=offloadings,
            active=room.active,
            reserved=min(room.reserved, room.device - self.base.points.outside),
            seconds=self.base.step_time,
        )

    def written(self, division: Division) -> Written:
        """A choice in the values of the holes."""
        checkpoint, fsdp = (
            (self.kinds[kind][low], self.kinds[kind][high], some)
            for kind, (low, high, some) in enumerate((division.checkpoint, division.fsdp))
        )
        return Written(checkpoint, fsdp, self.ways[division.offloading])

    def division(self, written: Written) -> Division:
        """The inverse of :meth:`written`."""
        checkpoint, fsdp = (
            (self.kinds[kind].index(low), self.kinds[kind].index(high), some)
            for kind, (low, high, some) in enumerate((written.checkpoint, written.fsdp))
        )
        return Division(checkpoint, fsdp, self.ways.index(written.offload))

    def values(self, written: Written) -> Values:
        """The values that say this, which are added to those of the holes where they are new."""
        checkpoint, fsdp = (self._value(kind, rule) for kind, rule in enumerate((written.checkpoint, written.fsdp)))
        return Values(checkpoint, fsdp, written.offload)

    def _value(self, kind: _Kind, rule: WrittenRule) -> int | None:
        low, high, some = rule
        hole = self.joint.holes[kind]
        if hole is None or low is None or high is None or not some:
            return high
        texts = self.joint.plan.holes[hole].choices
        others = "" if texts[high] == "none" else f", others = {texts[high]}"
        return self.joint.plan.add(hole, f"first({some}, {texts[low]}{others})")


def _added(left: PairCosts, right: PairCosts, base: PairCosts) -> PairCosts:
    """What is added to a base by two differences from it."""
    parts = zip(astuple(left), astuple(right), astuple(base), strict=True)
    return PairCosts(*(one + other - both for one, other, both in parts))
