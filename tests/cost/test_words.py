"""Figures as text."""

from __future__ import annotations

import pytest

from legoai.cost import words


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.5, "+1.50 s"), (-1.5, "−1.50 s"), (0.0, "0"), (5e-10, "0"), (-5e-10, "0"), (2e-6, "+2.00 us")],
)
def test_differences_have_a_sign_unless_they_are_rounding_errors(value: float, text: str):
    assert words.signed(value, words.seconds) == text
