"""Memoised computations: random ones give the same results as without memoisation."""

from __future__ import annotations

import random

import pytest

from legoai.dsl.frontend.kept import Inputs, Kept
from legoai.specs.directives.hole import Hole, Undecided

NAMES = ("a", "b", "c", "d")


class Plan:
    """Values by name, some of them holes, and computations over them that may use each other."""

    def __init__(self, values: dict[str, object], kept: Kept | None) -> None:
        self.values = values
        self.kept = kept
        self.inputs = None if kept is None else Inputs(kept, values.__getitem__)
        self.computed = 0

    def read(self, name: str) -> object:
        if self.kept is not None:
            self.kept.note(name)
        return self.values[name]

    def once(self, number: int) -> object:
        if self.inputs is None:
            return self.compute(number)
        return self.inputs.once(number, lambda: self.compute(number))

    def compute(self, number: int) -> object:
        """A computation whose reads and nested computations depend on the values read."""
        self.computed += 1
        choose = random.Random(number)
        total = 0
        for _ in range(4):
            value = self.read(choose.choice(NAMES))
            total += value * 3 + 1  # a hole raises
            choose.seed(f"{number} {total}")
            if number and choose.random() < 0.4:
                total += self.once(choose.randrange(number))
            if choose.random() < 0.2:
                break
        return total


def outcome(plan: Plan, number: int) -> object:
    try:
        return plan.once(number)
    except Undecided:
        return "undecided"


def test_memoised_results_equal_recomputed_results():
    chance, kept = random.Random(0), Kept()
    computed = anew = 0
    for _ in range(1500):
        values = {name: Hole() if chance.random() < 0.1 else chance.randrange(4) for name in NAMES}
        one, other = Plan(values, kept), Plan(values, None)
        for number in chance.sample(range(8), 3):
            assert outcome(one, number) == outcome(other, number)
        computed, anew = computed + one.computed, anew + other.computed
    assert 0 < computed < anew / 3


def test_input_becomes_a_dependency_once_it_has_two_values():
    """Also for plans and results that are older than the first value of the input."""
    kept = Kept()
    older, other, later = (Plan(dict.fromkeys(NAMES, 0) | {"d": value}, kept) for value in (0, 1, 2))

    def double(plan: Plan) -> object:
        return plan.inputs.once("double", lambda: 2 * plan.read("d"))

    def unlike(plan: Plan) -> object:
        return plan.inputs.once("a", lambda: plan.read("a") + 1)

    assert unlike(older) == 1
    assert [double(other), double(older), double(later), double(other)] == [2, 0, 4, 2]
    assert [unlike(plan) for plan in (other, later)] == [1, 1]


def test_cache_keys_distinguish_booleans_numbers_and_objects():
    kept = Kept()
    for value in (True, 1, 1.0, [1], [1, 2]):

        def named(value: object = value) -> object:
            kept.note("a")
            return repr(value)

        assert Inputs(kept, {"a": value}.__getitem__).once("text", named) == repr(value)


def test_memoised_exception_is_raised_again():
    kept, calls = Kept(), []

    def fails() -> None:
        calls.append(kept)
        raise Undecided("a hole")

    for _ in range(2):
        with pytest.raises(Undecided, match="a hole"):
            Inputs(kept, {}.__getitem__).once("fails", fails)
    assert len(calls) == 1


def test_interrupted_computation_is_not_memoised():
    kept, calls = Kept(), []

    def interrupted() -> str:
        calls.append(kept)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return "done"

    with pytest.raises(KeyboardInterrupt):
        Inputs(kept, {}.__getitem__).once("what", interrupted)
    assert not kept.open
    assert Inputs(kept, {}.__getitem__).once("what", interrupted) == "done"
