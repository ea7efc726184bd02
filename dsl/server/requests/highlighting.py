"""Semantic tokens: the kind of each word of a plan, for syntax highlighting, also of broken text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from lsprotocol import types

from legoai.dsl.frontend.parsing.parse import KEYWORDS
from legoai.dsl.frontend.syntax import Let
from legoai.dsl.server.cursor import Part, Token, parts
from legoai.dsl.server.documents import Document
from legoai.specs.directives import FAMILIES

_Types = types.SemanticTokenTypes
LEGEND: Final = (
    _Types.Keyword, _Types.Property, _Types.EnumMember, _Types.Function, _Types.Variable, _Types.Namespace,
    _Types.Number, _Types.String, _Types.Comment,
)  # fmt: skip
_OWN: Final = ("auto", "in", "on", "true", "false", "unset", "rest")


def semantic_tokens(document: Document) -> types.SemanticTokens:
    """Return the words of a document: line and character relative to the previous word, length and type of each."""
    data: list[int] = []
    line = character = 0
    numbers = {sort: number for number, sort in enumerate(LEGEND)}
    for token, sort in _sorted(document):
        on, start = document.positions.line_and_column(token.start)
        _, end = document.positions.line_and_column(token.end)
        data += (on - line, start - (character if on == line else 0), end - start, numbers[sort], 0)
        line, character = on, start
    return types.SemanticTokens(data)


def _sorted(document: Document) -> Iterator[tuple[Token, types.SemanticTokenTypes]]:
    names = {item.name.text for item in document.file.statements if isinstance(item, Let)}
    for token, part in parts(document.text, document.parsed.chunks):
        sort = _sort(token, part, document.text, names)
        if sort is not None:
            yield token, sort


def _sort(token: Token, part: Part, text: str, names: set[str]) -> types.SemanticTokenTypes | None:
    if token.kind == "comment":
        return _Types.Comment
    if token.kind in ("string", "number"):
        return _Types.String if token.kind == "string" else _Types.Number
    if part == "path":
        return _Types.Namespace
    if part == "statement":
        return _Types.Keyword if token.text in FAMILIES or token.text in KEYWORDS else None
    if token.text in _OWN:
        return _Types.Keyword
    behind = text[token.end : token.end + 80].lstrip(" \t")[:2]
    if part == "argument" and behind[:1] == "=" and behind != "==":
        return _Types.Property
    if token.text in names:
        return _Types.Variable
    return _Types.Function if behind[:1] == "(" and part in ("value", "argument") else _Types.EnumMember
