"""Path patterns: which modules and parameters a rule speaks of, and which rule wins where several do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

from legoai.specs.directives.base import PathRule, describe
from legoai.specs.record import Record

T = TypeVar("T")

ROOT = "root"
"""The plan's name of the model itself, whose path is the empty string in ``named_modules()``."""

_PIECE = re.compile(r"\*\*|\*|\{([^{}]*)\}|[A-Za-z0-9_\-]+|(.)")
_RANGE = re.compile(r"\s*([0-9]+)\s*\.\.\s*([0-9]+)\s*")
_WORD = re.compile(r"[A-Za-z0-9_\-]+")
_BARE_RANGE = re.compile(r"([0-9]+)\.\.\.?([0-9]+)")
FOREIGN_RANGE = re.compile(r"\s*([0-9]+)\s*(?:-|:|,?\s*\.\.\.\s*,?)\s*([0-9]+)\s*")
"""A range as other tools write it."""


class PathError(ValueError):
    """A pattern that cannot be read: the message, and the offset in the pattern's text at which it goes wrong."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.message = message
        self.offset = offset


class Braces(Record):
    """A pair of braces in a pattern: the position of its contents, and what they match."""

    start: int
    end: int
    members: tuple[str, ...]
    """The alternatives, or the numbers of the range."""
    is_range: bool


class Pattern(Record):
    """A compiled pattern.

    ``specificity`` orders patterns: of two that match the same path the one with the smaller value is the more
    specific. It counts, in this order, `**`, `*` and ranges, and then prefers more literal segments.
    """

    text: str
    regex: str
    specificity: tuple[int, int, int, int]
    braces: tuple[Braces, ...] = ()
    """In the order of the groups of ``regex``."""

    @property
    def is_path(self) -> bool:
        """Whether the pattern is the one path that it matches."""
        return self.specificity[:3] == (0, 0, 0) and not self.braces and self.text != ROOT

    def matches(self, path: str) -> bool:
        """Whether the pattern matches ``path``, which is written as ``named_modules()`` prints it."""
        return self.text == path if self.is_path else re.fullmatch(self.regex, path) is not None


@lru_cache(maxsize=1024)
def pattern(text: str) -> Pattern:
    """Compile a pattern.

    >>> pattern("layers.{0..1}.*").matches("layers.1.attention")
    True
    >>> pattern("layers.**").matches("layers.1.attention")
    True
    >>> pattern("root").matches("")
    True

    Raises:
        PathError: the text is no pattern.
    """
    if text == ROOT:
        return Pattern(text, "", (0, 0, 0, -1))
    segments = list(segments_of(text))
    counts = [0, 0]
    braces: list[Braces] = []
    literal = 0
    regex = ""
    for index, (offset, segment) in enumerate(segments):
        dot = r"\." if index and segments[index - 1][1] != "**" else ""
        if segment == "**":
            counts[0] += 1
            is_last = index + 1 == len(segments)
            # One after another means the same: of many, a path that does not match would be divided in every way.
            if is_last or not index or segments[index - 1][1] != "**":
                regex += dot + (r"[^\n]+" if is_last else r"(?:[^.\n]+\.)*")
            continue
        piece, stars, inside = _segment(segment, offset)
        counts[1] += stars
        braces += inside
        literal += not stars and not any(item.is_range for item in inside)
        regex += dot + piece
    ranges = sum(item.is_range for item in braces)
    return Pattern(text, regex, (counts[0], counts[1], ranges, -literal), tuple(braces))


def segments_of(text: str) -> Iterable[tuple[int, str]]:
    """The parts between dots, which inside of braces separate nothing, each with its offset."""
    start = depth = 0
    for offset, character in enumerate(text + "."):
        depth += (character == "{") - (character == "}")
        if character == "." and depth == 0:
            if offset == start:
                bare = _BARE_RANGE.search(text)
                cure = f"; a range stands in braces: `{{{bare[1]}..{bare[2]}}}`" if bare else ""
                raise PathError(f"a segment is empty{cure}", min(offset, max(0, len(text) - 1)))
            yield start, text[start:offset]
            start = offset + 1


def _segment(segment: str, offset: int) -> tuple[str, int, list[Braces]]:
    """One segment's regular expression, its number of `*` and its braces."""
    regex = ""
    stars = 0
    braces = []
    for match in _PIECE.finditer(segment):
        place = offset + match.start()
        if match[0] == "**":
            raise PathError("`**` stands for whole segments and cannot be a part of one", place)
        if match[2] is not None:
            raise PathError(f"unexpected `{match[2]}`", place)
        if match[0] == "*":
            stars += 1
            regex += r"[^.\n]+" if segment == "*" else r"[^.\n]*"  # the model itself is no segment
        elif match[1] is not None:
            found = _braces(match[1], place)
            braces.append(found)
            regex += f"({'|'.join(map(re.escape, found.members))})"
        else:
            regex += re.escape(match[0])
    return regex, stars, braces


def _braces(body: str, offset: int) -> Braces:
    start, end = offset + 1, offset + 1 + len(body)
    if match := _RANGE.fullmatch(body):
        first, last = int(match[1]), int(match[2])
        if first > last:
            raise PathError(f"the range {first}..{last} is empty", offset)
        if last - first > 10_000:
            raise PathError(f"the range {first}..{last} is too long", offset)
        return Braces(start, end, tuple(map(str, range(first, last + 1))), True)
    if match := FOREIGN_RANGE.fullmatch(body):
        raise PathError(f"a range is written `{{{match[1]}..{match[2]}}}`", offset)
    words = tuple(word.strip() for word in body.split(","))
    for word in words:
        if not _WORD.fullmatch(word):
            cure = "; alternatives are single segments: write a rule for each path" if "." in word else ""
            raise PathError(f"`{word}` is no name{cure}" if word else "an alternative is empty", offset)
    return Braces(start, end, words, False)


class Assignment(Record, Generic[T]):
    """Assignment of the rules of one block to paths."""

    by_path: dict[str, PathRule[T]]
    """The winning rule of each matched path, in the order of the paths."""
    unmatched: list[PathRule[T]]
    """Rules whose pattern matches nothing."""
    conflicts: list[tuple[str, PathRule[T], PathRule[T]]]
    """Paths with two equally specific rules of different values; one entry for each pair of rules."""
    shadowed: list[tuple[PathRule[T], PathRule[T]]]
    """A rule that never wins although it matches, and one that wins over it."""


class Paths:
    """The paths that patterns are matched against, joined once: a pattern is searched for, not tried path by path."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.names = paths
        self._known = frozenset(paths)
        self._text = "\n".join(paths)
        self._matching: dict[str, list[str]] = {}
        self._idle: dict[str, list[tuple[Braces, tuple[str, ...]]]] = {}

    def matching(self, found: Pattern) -> list[str]:
        """Return every path that the pattern matches, in order; the list is cached, and must not be changed."""
        if not found.regex:
            return [""] if "" in self._known else []
        if found.is_path:  # true of most; compiling an expression takes longer than reading the plan's line
            return [found.text] if found.text in self._known else []
        held = self._matching.get(found.regex)
        if held is None:
            held = [match[0] for match in re.finditer(f"^{found.regex}$", self._text, re.MULTILINE)]
            self._matching[found.regex] = held
        return held

    def idle_members(self, found: Pattern) -> list[tuple[Braces, tuple[str, ...]]]:
        """The alternatives and numbers in braces without which the pattern would match the same paths.

        Of a pattern that matches something.
        """
        if not found.braces:
            return []
        if found.text not in self._idle:
            self._idle[found.text] = list(self._find_idle(found))
        return self._idle[found.text]

    def _find_idle(self, found: Pattern) -> Iterator[tuple[Braces, tuple[str, ...]]]:
        matches = list(re.finditer(f"^{found.regex}$", self._text, re.MULTILINE))
        for number, braces in enumerate(found.braces, 1):
            seen = {match[number] for match in matches}
            idle = [member for member in braces.members if member not in seen]
            if len(found.braces) > 1 or "*" in found.text:
                # Where a path can be read in two ways, the expression's engine shows only one of them.
                idle = [member for member in idle if not self.matching(_with_member(found, braces, member))]
            if idle:
                yield braces, tuple(idle)


def _with_member(found: Pattern, braces: Braces, member: str) -> Pattern:
    return pattern(f"{found.text[: braces.start - 1]}{member}{found.text[braces.end + 1 :]}")


def assign(rules: Sequence[PathRule[Any]], paths: Paths) -> Assignment[Any]:
    """Assign a rule to each path.

    Rules with an unreadable or undecided pattern must have been removed.
    """
    result: Assignment[Any] = Assignment({}, [], [], [])
    winners: dict[str, tuple[tuple[int, int, int, int], PathRule[Any]]] = {}
    conflicts: dict[tuple[int, int], tuple[PathRule[Any], PathRule[Any], list[str]]] = {}
    matched: list[list[str]] = []
    for rule in rules:
        compiled = pattern(rule.path)
        hits = paths.matching(compiled)
        matched.append(hits)
        if not hits:
            result.unmatched.append(rule)
        for path in hits:
            held = winners.get(path)
            if held is None or compiled.specificity < held[0]:
                winners[path] = compiled.specificity, rule
            elif compiled.specificity == held[0] and not _same(held[1].treatment, rule.treatment):
                conflicts.setdefault((id(held[1]), id(rule)), (held[1], rule, []))[2].append(path)
    for first, second, both in conflicts.values():
        undecided = next((path for path in both if winners[path][1] is first), None)
        if undecided is not None:
            result.conflicts.append((undecided, first, second))
    alive = {id(rule) for _, rule in winners.values()}
    for rule, hits in zip(rules, matched, strict=True):
        if hits and id(rule) not in alive and not any(rule is pair[2] for pair in result.conflicts):
            result.shadowed.append((rule, winners[hits[0]][1]))
    result.by_path.update((path, winners[path][1]) for path in paths.names if path in winners)
    return result


def _same(left: Any, right: Any) -> bool:
    return bool(describe(left) == describe(right))
