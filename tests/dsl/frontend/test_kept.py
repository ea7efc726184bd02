"""Results kept by what was read: random computations give what they give without anything kept."""

from __future__ import annotations

import random

import pytest

from legoai.dsl.frontend.kept import Kept, identity
from legoai.specs.directives.hole import Hole, Undecided

NAMES = ("a", "b", "c", "d")


class Plan:
    """Values by name, some of them holes, and computations over them that may use each other."""

    def __init__(self, values: dict[str, object], kept: Kept | None) -> None:
        self.values = values
        self.kept = kept
        self.computed = 0

    def read(self, name: str) -> object:
        if self.kept is not None:
            self.kept.note(name, self.values[name])
        return self.values[name]

    def once(self, number: int) -> object:
        if self.kept is None:
            return self.compute(number)
        return self.kept.use(
            self.kept.result(number, lambda name: identity(self.values[name]), lambda: self.compute(number))
        )

    def compute(self, number: int) -> object:
        """A computation whose reads, and whose use of smaller ones, depend on what it has read."""
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


def test_kept_results_are_those_of_computing_them_anew():
    chance, kept = random.Random(0), Kept()
    computed = anew = 0
    for _ in range(1500):
        values = {name: Hole() if chance.random() < 0.1 else chance.randrange(4) for name in NAMES}
        one, other = Plan(values, kept), Plan(values, None)
        for number in chance.sample(range(8), 3):
            assert outcome(one, number) == outcome(other, number)
        computed, anew = computed + one.computed, anew + other.computed
    assert 0 < computed < anew / 3


def test_a_boolean_is_no_number_and_two_objects_are_two():
    kept, values = Kept(), {"a": True}

    def named() -> object:
        kept.note("a", values["a"])
        return repr(values["a"])

    for value in (True, 1, [1], [1, 2]):
        values["a"] = value
        assert kept.use(kept.result("text", lambda name: identity(values[name]), named)) == repr(value)


def test_what_was_raised_is_raised_again():
    kept, calls = Kept(), []

    def fails() -> None:
        calls.append(kept)
        raise Undecided("a hole")

    for _ in range(2):
        with pytest.raises(Undecided, match="a hole"):
            kept.use(kept.result("fails", lambda _: None, fails))
    assert len(calls) == 1


def test_an_interrupt_keeps_nothing():
    kept, calls = Kept(), []

    def interrupted() -> str:
        calls.append(kept)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return "done"

    with pytest.raises(KeyboardInterrupt):
        kept.result("what", lambda _: None, interrupted)
    assert not kept.computes
    assert kept.use(kept.result("what", lambda _: None, interrupted)) == "done"
