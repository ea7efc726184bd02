"""Multiplicative effects of single choices on cost and memory, estimated from evaluated candidates."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from legoai.cost.search.candidates import Choices


class Amounts(NamedTuple):
    """What is asked of a candidate: its cost, and bytes of its memory.

    Attributes:
        cost: of the objective.
        reserved: by the allocator.
        active: at most.
        state: of these, what is no activation.
    """

    cost: float
    reserved: float
    active: float
    state: float


class _Ratios(NamedTuple):
    """What one of two candidates has more of than the other: of cost, and of memory beside the state."""

    cost: float
    reserved: float
    active: float


class Effects:
    """Predicts candidates from those that were evaluated.

    Two that differ in one answer show by how much that one changes each amount. Beside other answers it is taken to
    change them by as much: what is predicted decides what is evaluated next, and nothing else.

    Args:
        bound: the bounds of answers, open ones among them; None where lint or a bound excludes them.
    """

    def __init__(self, bound: Callable[[Choices], Amounts | None]) -> None:
        self._bound = bound
        self._seen: dict[Choices, Amounts] = {}
        self._known: dict[tuple[int, int | None, int | None], _Ratios] = {}

    def observe(self, choices: Choices, amounts: Amounts) -> None:
        """Compare a candidate with those that were evaluated before it.

        Of several with the same answers, which differ in styles, the cheapest counts.
        """
        if choices in self._seen and self._seen[choices].cost <= amounts.cost:
            return
        for other, before in self._seen.items():
            differing = _differing(other, choices)
            if len(differing) == 1:
                hole = differing[0]
                self._known[hole, other[hole], choices[hole]] = _ratios(amounts, before)
                self._known[hole, choices[hole], other[hole]] = _ratios(before, amounts)
        self._seen[choices] = amounts

    def predicted(self, base: Choices, choices: Choices) -> Amounts | None:
        """What a candidate is likely to take; answers without an observed effect count by their bounds.

        Args:
            base: a candidate that was evaluated.
            choices: the candidate; None is returned where lint or a bound excludes it.
        """
        ratios, unseen = _Ratios(1.0, 1.0, 1.0), []
        for hole in _differing(base, choices):
            seen = self._known.get((hole, base[hole], choices[hole]))
            if seen is None:
                unseen.append(hole)
            else:
                ratios = _product(ratios, seen)
        bound = self._bound(choices)
        if bound is None:
            return None
        if unseen:
            without = tuple(base[hole] if hole in unseen else value for hole, value in enumerate(choices))
            ratios = _product(ratios, _ratios(bound, self._bound(without) or self._bound(base) or bound))
        known = self._seen[base]
        reserved, active = (
            bound.state + (before - known.state) * ratio
            for before, ratio in ((known.reserved, ratios.reserved), (known.active, ratios.active))
        )
        return Amounts(known.cost * ratios.cost, reserved, active, bound.state)


def _differing(one: Choices, other: Choices) -> list[int]:
    return [hole for hole, (mine, its) in enumerate(zip(one, other, strict=True)) if mine != its]


def _ratios(amounts: Amounts, before: Amounts) -> _Ratios:
    return _Ratios(
        _ratio(amounts.cost, before.cost),
        _ratio(amounts.reserved - amounts.state, before.reserved - before.state),
        _ratio(amounts.active - amounts.state, before.active - before.state),
    )


def _ratio(one: float, other: float) -> float:
    return one / other if other else 1.0


def _product(one: _Ratios, other: _Ratios) -> _Ratios:
    return _Ratios(*(mine * its for mine, its in zip(one, other, strict=True)))
