"""Encoding of texts by a tokenizer in batches of limited size, long texts in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

_AT_ONCE: Final = 512
"""Most pieces that are encoded together, beside each other."""

_CHARACTERS: Final = 1 << 21
"""Length from which on pieces are not encoded together: an encoding is many times larger than its text."""

_LONGEST: Final = 1 << 16
"""Length in characters from which on a text is encoded in pieces of whole lines."""

_CONTEXT: Final = 256
"""Characters on each side of a piece that are encoded with it, since the tokens at an end of a text differ: a tokenizer
may begin every text with a space."""


class EncodingError(Exception):
    """A tokenizer cannot encode a text; the message is the library's."""


class _Piece(NamedTuple):
    """Piece of a text.

    Attributes:
        text: with its context.
        start: of its context in the whole text.
        seam: where the piece itself begins in the whole text.
        is_last: of the whole text.
    """

    text: str
    start: int
    seam: int
    is_last: bool


class _Encoded(NamedTuple):
    piece: _Piece
    encoding: Any
    ids: NDArray[Any]

    @property
    def end(self) -> int:
        """End of the piece's text in the whole text."""
        return self.piece.start + len(self.piece.text)

    def place(self, token: int) -> tuple[int, int] | None:
        """Begin and end of a token in the whole text."""
        found = self.encoding.token_to_chars(token)
        return None if found is None else (self.piece.start + found[0], self.piece.start + found[1])

    def token_at(self, position: int) -> int | None:
        """The first token with the character at a position of the whole text."""
        return self.encoding.char_to_token(position - self.piece.start)  # type: ignore[no-any-return]


def encoded(tokenizer: Any, texts: Iterable[str], dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    """Yield the tokens of texts, each as if it were encoded at once, but for runs without a token in common.

    Args:
        tokenizer: of the package `tokenizers`.
        texts: read as they are needed.
        dtype: of the tokens.

    Raises:
        EncodingError: the tokenizer cannot encode a text.
    """
    found: list[NDArray[Any]] = []
    last: _Encoded | None = None
    begin = 0
    for piece in _encoded_pieces(tokenizer, (piece for text in texts for piece in _pieces(text)), dtype):
        following = piece
        if last is not None:
            common = _common_token(last, following)
            if common is None:
                following = _behind(last, following, tokenizer)
                common = len(last.ids), 0
            found.append(last.ids[begin : common[0]])
            begin = common[1]
        last = following
        if following.piece.is_last:
            yield np.concatenate([*found, following.ids[begin:]])
            found, last, begin = [], None, 0


def _encoded_pieces(tokenizer: Any, pieces: Iterable[_Piece], dtype: np.dtype[Any]) -> Iterator[_Encoded]:
    for several in _batches(pieces):
        encodings = _encodings(tokenizer, [piece.text for piece in several])
        for piece, encoding in zip(several, encodings, strict=True):
            yield _Encoded(piece, encoding, np.array(encoding.ids, dtype=dtype))


def _encodings(tokenizer: Any, texts: list[str]) -> list[Any]:
    try:
        return list(tokenizer.encode_batch(texts, add_special_tokens=False))
    except Exception as error:  # of the library's own, without a common class
        raise EncodingError(str(error)) from error


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    several: list[_Piece] = []
    characters = 0
    for piece in pieces:
        several.append(piece)
        characters += len(piece.text)
        if len(several) == _AT_ONCE or characters >= _CHARACTERS:
            yield several
            several, characters = [], 0
    if several:
        yield several


def _pieces(text: str) -> Iterator[_Piece]:
    """Split a long text after ends of lines; pieces are longer than their context."""
    seam = 0
    while len(text) - seam > _LONGEST:
        end = text.rfind("\n", seam + _LONGEST // 2, seam + _LONGEST) + 1 or seam + _LONGEST
        start = max(0, seam - _CONTEXT)
        yield _Piece(text[start : end + _CONTEXT], start, seam, is_last=False)
        seam = end
    start = max(0, seam - _CONTEXT)
    yield _Piece(text[start:], start, seam, is_last=True)


def _common_token(left: _Encoded, right: _Encoded) -> tuple[int, int] | None:
    """Return the first token behind the seam, in both pieces, that is the same in both."""
    for number, token in enumerate(right.ids):
        place = right.place(number)
        if place is not None and place[0] >= right.piece.seam:
            same = left.token_at(place[0])
            if same is not None and left.ids[same] == token and left.place(same) == place:
                return same, number
            if place[0] >= left.end:
                return None
    return None


def _behind(left: _Encoded, right: _Encoded, tokenizer: Any) -> _Encoded:
    """Return what follows the left piece and its context, without any context of its own."""
    text = right.piece.text[left.end - right.piece.start :]
    piece = right.piece._replace(text=text, start=left.end, seam=left.end)
    [encoding] = _encodings(tokenizer, [text])
    return _Encoded(piece, encoding, np.array(encoding.ids, dtype=left.ids.dtype))
