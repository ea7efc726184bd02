"""Context of the cursor in a plan's text: the part of a statement there, even where the text is broken."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

from legoai.dsl.frontend.parsing.parse import chunks
from legoai.specs.directives import FAMILIES, family
from legoai.specs.directives.base import Calls, Declared, Directive, Option, Treatment
from legoai.specs.directives.kinds import Kind, ListOf, parts_of
from legoai.specs.directives.require import COMPARISONS
from legoai.specs.record import Record

Part = Literal["statement", "head", "axis", "argument", "value", "path", "text", "comment"]
"""Part of a plan: a keyword; its value; an axis; an option's name or a positional value; a value; a module's path;
inside a string; inside a comment."""


Hole = Literal["", "auto", "in", "domain", "answer"]
"""What of a hole precedes: nothing, `auto`, `auto in`, its domain too; or a plain value is expected, in the list of a
domain or after `->`."""


class Place(Record, kw_only=True):
    """Context at one position of a text."""

    part: Part
    start: int
    """Start of the word at the position, or of the word that would begin there."""
    keyword: str = ""
    """Of the statement."""
    subject: str = ""
    """The value after the keyword."""
    owner: type[Declared] | None = None
    """The directive or treatment in whose parentheses the position is."""
    options: tuple[Option, ...] = ()
    """The options that these parentheses accept."""
    option: Option | None = None
    """Of the value."""
    kind: Kind | None = None
    """Of the value; None where it may be anything."""
    in_list: bool = False
    """Whether the value is an item of a list."""
    path: str = ""
    """Of the rule whose treatment the value is."""
    axes: tuple[str, ...] = ()
    """Those of the statement."""
    given: tuple[str, ...] = ()
    """Names of the options, or axes, that precede."""
    hole: Hole = ""
    in_variant: bool = False


_TOKEN: Final = re.compile(
    r'(?P<string>"(?:[^"\\\n]|\\.)*"?)|(?P<comment>#[^\n]*)|(?P<line>\n)'
    r"|(?P<number>[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?:[A-Za-z]+|%)?(?![A-Za-z0-9_]))"
    r"|(?P<word>[A-Za-z0-9_.]+)|(?P<sign>[<>=-]=?>?|\S)"
)
_WORDS: Final = ("word", "number", "path")
_PATH: Final = re.compile(r"(?:[A-Za-z0-9_*.\-]|\{[^{}=#\n]*\}|\{[^{}=#\n]*(?=\n|\Z))+")
_WORD_BEHIND: Final = re.compile(r"[A-Za-z0-9_.]*")


class _Frame:
    """A statement, or a pair of brackets that is open."""

    def __init__(self, sort: Literal["statement", "variant", "arguments", "block", "list"], keyword: str = "") -> None:
        self.sort = sort
        self.keyword = keyword
        self.subject = ""
        self.declared: type[Directive] | None = None
        self.phase = ""
        """Of a statement `on` or `value`, of a rule or an argument `value`."""
        self.owner: type[Declared] | None = None
        self.options: tuple[Option, ...] = ()
        self.option: Option | None = None
        self.kind: Kind | None = None
        self.given: list[str] = []
        self.position = 0
        self.last = ""
        """The last word of the item."""
        self.is_decided = False
        """Whether it is the list of a hole's domain, or inside of one or of an answer, which have no holes."""
        self.hole: Hole = ""

    def next_item(self) -> None:
        """Begin the next argument or rule."""
        if self.sort == "arguments" and self.last:
            positional = self.options[self.position].name if self.position < len(self.options) else ""
            self.given.append(self.option.name if self.option is not None else positional)
            self.position += 1
        self.phase, self.last, self.option, self.hole = "", "", None, ""

    def expected(self) -> tuple[Option | None, Kind | None]:
        """The option whose value is expected, and its kind."""
        if self.sort == "arguments":
            option = self.option
            if self.phase != "value" and self.position < len(self.options):
                option = self.options[self.position]
            return option, None if option is None else option.kind
        return None, self.kind


def place_at(text: str, offset: int) -> Place:
    """Return the context at a character, given its statement's text before it."""
    frames, start = [_Frame("statement")], offset
    first = max((begin for begin, _ in chunks(text) if begin <= offset), default=0)
    for token in _tokens(text, first, offset, frames):
        if token.kind in ("string", "comment") and token.end >= offset and not _is_closed(token, offset):
            part: Part = "text" if token.kind == "string" else "comment"
            return _place(part, frames, token.start + (token.kind == "string"))
        if token.end == offset and token.kind in _WORDS:
            start = token.start  # start of the word at the position
            break
        _take(token, frames)
    return _place(_part(frames), frames, start)


def word_at(text: str, offset: int) -> tuple[Place, int]:
    """Return the context at a character, and the end of the word or path there."""
    place = place_at(text, offset)
    if place.part == "text":
        end = re.compile(r'["\n]|\Z').search(text, offset)
        return place, end.start() if end is not None else offset
    if place.part == "path":
        path = _PATH.match(text, place.start)
        return place, max(offset, path.end()) if path is not None else offset  # nested braces are no path
    behind = _WORD_BEHIND.match(text, offset)
    return place, behind.end() if behind is not None else offset


class Token(NamedTuple):
    """A word, path, string, comment or sign, with its position."""

    kind: str
    text: str
    start: int
    end: int


def parts(text: str, statements: Iterable[tuple[int, int]]) -> Iterator[tuple[Token, Part]]:
    """Yield the words of a text, each with its part.

    Args:
        text: of a plan.
        statements: the start of each, and of the next one.
    """
    for first, last in statements:
        frames = [_Frame("statement")]
        for token in _tokens(text, first, last, frames):
            if token.kind in (*_WORDS, "string", "comment"):
                yield token, _part(frames)
            _take(token, frames)


def _tokens(text: str, start: int, stop: int, frames: Sequence[_Frame]) -> Iterator[Token]:
    """The tokens up to ``stop``. A path is one token, which depends on the brackets that are open."""
    position = start
    while position < stop:
        path = _PATH.match(text, position, stop) if _part(frames) == "path" else None
        match = path or _TOKEN.match(text, position, stop)
        if match is None:
            position += 1
            continue
        kind = "path" if path is not None else str(match.lastgroup)
        position = match.end()
        yield Token(kind, match[0], match.start(), match.end())


def _is_closed(token: Token, offset: int) -> bool:
    return token.kind == "string" and len(token.text) > 1 and token.text[-1] == '"' and token.end == offset


def _take(token: Token, frames: list[_Frame]) -> None:
    top = frames[-1]
    if token.kind == "line" or token.text == ",":
        _separate(token, frames)
    elif token.kind in (*_WORDS, "string"):
        if top.sort == "statement":
            _word(token.text, top)
        top.last, top.hole = token.text, _hole_after(token.text, top.hole)
    elif token.text == "=":
        top.phase = "value"
        top.option = next((item for item in top.options if item.name == top.last), None)
    elif token.text in COMPARISONS:
        top.phase = "value"
    elif token.text == "->":
        top.hole = "answer"
    elif token.text in ("(", "[", "{"):
        _open(token.text, frames)
    elif token.text in (")", "]", "}") and len(frames) > 1:
        closed = frames.pop()
        if frames[-1].sort == "variant":
            frames.pop()
        elif closed.is_decided and frames[-1].hole == "in":
            frames[-1].hole = "domain"


def _hole_after(word: str, hole: Hole) -> Hole:
    if hole == "answer":
        return hole
    if word == "auto":
        return "auto"
    if word == "in" and hole == "auto":
        return "in"
    return "domain" if hole in ("in", "domain") else ""


def _separate(token: Token, frames: list[_Frame]) -> None:
    top = frames[-1]
    if top.sort != "statement":
        top.next_item()
    elif token.kind == "line":
        frames[-1] = _Frame("statement")


def _word(word: str, statement: _Frame) -> None:
    if not statement.keyword:
        statement.keyword = word
        statement.declared = family(word) if word in FAMILIES else None
    elif word == "on":
        statement.phase = "on"
    elif statement.phase == "on":
        statement.given.append(word)
    elif not statement.subject:
        statement.subject = word


def _open(sign: str, frames: list[_Frame]) -> None:
    top = frames[-1]
    statement = next(frame for frame in reversed(frames) if frame.sort == "statement")
    if sign == "{":
        if statement.keyword == "variant":
            frames += [_Frame("variant"), _Frame("statement")]
            return
        block = _Frame("block", statement.keyword)
        block.kind = None if statement.declared is None else statement.declared.treatments
        frames.append(block)
        return
    option, kind = top.expected()
    if sign == "[":
        inner = _Frame("list")
        inner.owner, inner.option = top.owner, option
        # After `in` there is a list of values, not a value that is a list.
        inner.kind = kind if top.last == "in" else next((x.item for x in _parts(kind) if isinstance(x, ListOf)), None)
        inner.is_decided = top.is_decided or top.hole in ("in", "answer")
        frames.append(inner)
        return
    inner = _Frame("arguments")
    inner.owner, inner.options = _holder(top, kind)
    inner.is_decided = top.is_decided or top.hole == "answer"
    frames.append(inner)


def _holder(top: _Frame, kind: Kind | None) -> tuple[type[Declared] | None, tuple[Option, ...]]:
    """Return the owner of the parentheses after the text read so far, and their options."""
    if top.sort != "statement":
        found = treatment_of(kind, top.last)
        return found, () if found is None else found.options
    declared = top.declared
    if declared is None:
        return None, ()
    own = tuple(item for item in declared.options if item.field != declared.subject)
    layout = next((item for item in declared.layouts if item.name == top.subject), None)
    if declared.subject is not None and not declared.subject_holds_options and top.last == top.subject:
        inner = treatment_of(declared.option(declared.subject).kind, top.subject)
        if inner is not None:
            return inner, inner.options
    return declared, own if layout is None else (*layout.options, *own)


def treatment_of(kind: Kind | None, name: str) -> type[Treatment] | None:
    """The treatment with this name that a value of the kind may be."""
    calls = [part for part in _parts(kind) if isinstance(part, Calls)]
    return next((item for part in calls for item in part.treatments if item.name == name), None)


def _parts(kind: Kind | None) -> Iterator[Kind]:
    return iter(()) if kind is None else parts_of(kind)


def _part(frames: Sequence[_Frame]) -> Part:
    top = frames[-1]
    if top.sort == "statement":
        if not top.keyword:
            return "statement"
        return "axis" if top.phase == "on" else "value" if top.phase == "value" else "head"
    if top.phase == "value" or top.sort == "list":
        return "value"
    return "path" if top.sort == "block" else "argument"


def _place(part: Part, frames: Sequence[_Frame], start: int) -> Place:
    top = frames[-1]
    statement = next(frame for frame in reversed(frames) if frame.sort == "statement")
    option, kind = top.expected()
    if top.sort == "statement" and top.declared is not None and top.declared.subject is not None:
        option = top.declared.option(top.declared.subject)
        kind = option.kind
    elif top.sort == "list":
        option = top.option
    return Place(
        part=part,
        start=start,
        keyword=statement.keyword,
        subject=statement.subject,
        owner=top.owner,
        options=top.options,
        option=option,
        kind=kind,
        in_list=top.sort == "list",
        path=top.last if top.sort == "block" and top.phase == "value" else "",
        axes=tuple(statement.given),
        given=tuple(top.given),
        hole="answer" if top.is_decided else top.hole,
        in_variant=any(frame.sort == "variant" for frame in frames),
    )
