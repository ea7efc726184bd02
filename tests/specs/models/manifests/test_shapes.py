"""Shapes in samples and tokens, from the shapes that a model has at two sizes."""

from __future__ import annotations

import itertools

import pytest

from legoai.specs.models.manifests.shapes import Length, compared, guessed, other_sizes, sizes_of, words

SIZES = [(2, 8), (1, 1), (3, 7), (4, 3), (1, 128), (8, 8)]
SHAPE = Length(1, samples=True), Length(1, tokens=True), Length(32)


@pytest.mark.parametrize("sizes", SIZES)
def test_lengths_grow_by_ratios_of_their_own(sizes: tuple[int, int]):
    others = other_sizes(sizes)
    units = [(1, 1), sizes, (sizes[0] * sizes[1], others[0] * others[1])]
    ratios = [1.0, others[0] / sizes[0], others[1] / sizes[1], units[2][1] / units[2][0]]
    assert all(abs(one - other) > 1e-9 for one, other in itertools.combinations(ratios, 2))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("factor", [1, 2, 6])
def test_every_multiple_is_found_whatever_the_sizes_are(sizes: tuple[int, int], factor: int):
    for samples, tokens in itertools.product((False, True), repeat=2):
        shape = (Length(factor, samples=samples, tokens=tokens), *SHAPE)
        seen = [sizes_of(shape, one) for one in (sizes, other_sizes(sizes))]
        assert compared(*seen, sizes, other_sizes(sizes)) == shape


@pytest.mark.parametrize(("first", "second"), [((9, 4), (5, 4)), ((16,), (13,)), ((2, 8), (3, 4, 1))])
def test_a_length_that_is_no_multiple_is_unknown(first: tuple[int, ...], second: tuple[int, ...]):
    assert compared(first, second, (2, 8), (3, 4)) is None


@pytest.mark.parametrize(
    ("seen", "shape"),
    [
        ((2, 8, 8), "[batch, length, 8]"),
        ((8, 2, 32), "[length, batch, 32]"),
        ((16, 32), "[batch · length, 32]"),
        ((2, 8, 16), "[batch, length, 16]"),
        ((8, 4), "[length, 4]"),
    ],
)
def test_one_size_leaves_a_guess(seen: tuple[int, ...], shape: str):
    assert words(guessed(seen, (2, 8))) == shape


def test_words_name_factors():
    assert words((Length(2, samples=True), Length(3), Length(1))) == "[2 · batch, 3, 1]"
