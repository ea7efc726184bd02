"""Positions of the protocol against a count of every character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lsprotocol import types

from legoai.dsl.server.positions import Positions, replacement

TEXTS = st.text(st.sampled_from("ab é\u2028\x0c🚀\r\n\t"), max_size=40)
ENCODINGS = ("utf-8", "utf-16", "utf-32")
UNITS = {"utf-8": ("utf-8", 1), "utf-16": ("utf-16-le", 2), "utf-32": ("utf-32-le", 4)}


def counted(text: str, offset: int, encoding: str) -> types.Position:
    """The position of a character, by going over all before it."""
    codec, size = UNITS[encoding]
    line = character = index = 0
    while index < offset:
        if text[index] in "\r\n":
            end = index + (2 if text[index : index + 2] == "\r\n" else 1)
            if end > offset:
                break  # inside of the two signs that end a line
            line, character, index = line + 1, 0, end
        else:
            character += len(text[index].encode(codec)) // size
            index += 1
    return types.Position(line, character)


@given(TEXTS, st.sampled_from(ENCODINGS))
def test_offsets_and_positions_round_trip(text: str, encoding: str):
    positions = Positions(text, encoding)
    for offset in range(len(text) + 1):
        position = positions.position(offset)
        assert position == counted(text, offset, encoding)
        inside = text[offset - 1 : offset + 1] == "\r\n"
        assert positions.offset(position) == (offset - 1 if inside else offset)


@pytest.mark.parametrize(
    ("line", "character", "offset"), [(0, 1, 0), (0, 2, 1), (0, 99, 2), (1, 99, 6), (9, 0, 7), (1, 1, 5)]
)
def test_positions_beyond_the_text_are_clamped(line: int, character: int, offset: int):
    """A position inside a character is its start; one after a line is the end of the line."""
    assert Positions("🚀a\r\nbc\n").offset(types.Position(line, character)) == offset


def test_byte_order_mark_shifts_the_first_line_only():
    for encoding, units in (("utf-8", 3), ("utf-16", 1), ("utf-32", 1)):
        positions = Positions("ab\ncd", encoding, mark=True)
        assert positions.position(1) == types.Position(0, units + 1)
        assert positions.offset(types.Position(0, units + 1)) == 1
        assert positions.offset(types.Position(0, 0)) == 0
        assert positions.position(4) == types.Position(1, 1)
        assert positions.whole == types.Range(types.Position(0, 0), types.Position(1, 2))


@given(TEXTS, TEXTS, st.sampled_from(ENCODINGS))
def test_replacement_edits_give_the_new_text(before: str, after: str, encoding: str):
    positions = Positions(before, encoding)
    edits = replacement(positions, after)
    assert len(edits) == (before != after)
    text = before
    for edit in edits:
        start, end = positions.offset(edit.range.start), positions.offset(edit.range.end)
        text = before[:start] + edit.new_text + before[end:]
    assert text == after
