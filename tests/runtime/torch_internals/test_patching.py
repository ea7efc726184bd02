"""Temporary patches restore a class's own attribute, an inherited one, and a module's."""

from __future__ import annotations

import math

import pytest

from legoai.runtime.torch_internals.patching import patched_attribute


class Above:
    def answer(self) -> str:
        return "above"


class Below(Above):
    @staticmethod
    def own() -> str:
        return "own"


def test_inherited_attribute_is_patched_and_restored():
    with patched_attribute(Below, "answer", lambda self: "instead"):
        assert (Below().answer(), Above().answer()) == ("instead", "above")
    assert "answer" not in Below.__dict__
    assert Below().answer() == "above"


def test_own_attributes_are_restored_after_an_error():
    before = Below.__dict__["own"], math.pi
    with (
        pytest.raises(ValueError, match="end"),
        patched_attribute(Below, "own", None),
        patched_attribute(math, "pi", 3),
    ):
        assert (Below.own, math.pi) == (None, 3)
        raise ValueError("end")
    assert (Below.__dict__["own"], math.pi) == before


def test_patching_a_missing_attribute_is_an_error():
    with pytest.raises(AttributeError, match="nothing"), patched_attribute(Below, "nothing", 1):
        pass
