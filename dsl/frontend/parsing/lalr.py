"""LALR parser of the plan language, from tables that are cached in a directory that only this user can write."""

from __future__ import annotations

import contextlib
import hashlib
import io
import sys
from functools import cache
from pathlib import Path
from typing import Any

import lark
from lark import Lark
from lark.lexer import Lexer, LexerState, LexerThread, LineCounter
from lark.utils import TextSlice

from legoai.specs.cache import private_cache, read_cached, write_cached


class _FromOffset(LexerThread):
    """Lexes a slice without counting the lines before it, which would take longer for each statement of a text."""

    @classmethod
    def from_text(cls, lexer: Lexer, text: str | bytes | TextSlice[Any]) -> LexerThread:
        counter = LineCounter("\n")  # type: ignore[no-untyped-call]
        counter.char_pos = text.start if isinstance(text, TextSlice) else 0
        return cls(lexer, LexerState(TextSlice.cast_from(text), counter))


@cache
def grammar() -> Lark:
    """Return the parser, from the cache where its tables are those of this grammar and version.

    lark's own cache has no digest of the tables: with another byte in them, they would read another language.
    """
    text = Path(__file__).parents[2].joinpath("grammar", "plan.lark").read_text(encoding="utf-8")
    directory = private_cache("grammar")
    file = None if directory is None else directory / "plan.parser"
    options: dict[str, Any] = {"parser": "lalr", "lexer": "contextual", "propagate_positions": False,
                               "keep_all_tokens": False, "_plugins": {"LexerThread": _FromOffset}}  # fmt: skip
    key = hashlib.sha256(repr([text, options, lark.__version__, sys.version_info[:2]]).encode()).digest()
    held = None if file is None else read_cached(file, before=True)
    if held is not None and held.startswith(key):
        # Unpickling raises whatever its instructions raise: where a class is not there, for one.
        with contextlib.suppress(Exception):
            return Lark.load(io.BytesIO(held[len(key) :]))
    made = Lark(text, **options)
    if file is not None:
        tables = io.BytesIO()
        made.save(tables)
        with contextlib.suppress(OSError):
            write_cached(file, key + tables.getvalue())
    return made
