"""Temporary patches restore a class's own attribute, an inherited one, and a module's."""

from __future__ import annotations

import math

import pytest

from legoai.runtime.torch_internals.patching import patched_attribute


class Above:
    def told(self) -> str:
        return "above"


class Below(Above):
    @staticmethod
    def own() -> str:
        return "own"


def test_what_a_class_inherits_is_covered_and_not_kept():
    with patched_attribute(Below, "told", lambda self: "instead"):
        assert (Below().told(), Above().told()) == ("instead", "above")
    assert "told" not in Below.__dict__
    assert Below().told() == "above"


def test_what_a_class_or_module_has_comes_back_also_after_an_error():
    before = Below.__dict__["own"], math.pi
    with (
        pytest.raises(ValueError, match="end"),
        patched_attribute(Below, "own", None),
        patched_attribute(math, "pi", 3),
    ):
        assert (Below.own, math.pi) == (None, 3)
        raise ValueError("end")
    assert (Below.__dict__["own"], math.pi) == before


def test_a_name_that_is_not_there_is_an_error():
    with pytest.raises(AttributeError, match="nothing"), patched_attribute(Below, "nothing", 1):
        pass
