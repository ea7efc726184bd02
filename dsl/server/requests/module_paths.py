"""Module paths of a model: completions of an unfinished path, and the modules that a path matches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from legoai.dsl.frontend.paths import ROOT, PathError, pattern
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.record import Record

_OPEN: Final = re.compile(r"\{([^{}]*)\Z")
"""Alternatives that are not closed yet."""


class Segment(Record):
    """A completion of a path: its text, and its kind."""

    text: str
    what: str


def segments(manifest: Manifest, written: str, *, parameters: bool) -> list[Segment]:
    """Return the completions at the end of an unfinished path, for all modules that the finished part matches.

    Args:
        manifest: of the model.
        written: the path up to the cursor.
        parameters: whether parameters are included.
    """
    before, _ = divided(written)
    holders = list(_holders(manifest, before))
    found: dict[str, str] = {}
    numbers: list[int] = []
    for holder in holders:
        info = manifest.modules[holder]
        for child in info.children:
            if child.isdecimal():
                numbers.append(int(child))
            else:
                found.setdefault(child, manifest.modules[info.child_path(child)].class_name)
        if parameters:
            for item in info.parameters:
                found.setdefault(item.name, f"parameter {' × '.join(map(str, item.shape))}")
    result = [Segment(name, what) for name, what in found.items()]
    inside = _OPEN.search(written) is not None
    if numbers:
        last = max(numbers)
        result = [*_numbered(last, inside=inside), *result]
    if not before and not inside:
        result.append(Segment(ROOT, "the model itself"))
    return result


def divided(written: str) -> tuple[str, int]:
    """Return the finished part of an unfinished path, and the start of the segment, or alternative, after it."""
    braces = _OPEN.search(written)
    head = written if braces is None else written[: braces.start()]
    before, dot, _ = head.rpartition(".")
    if braces is None:
        return before, len(before) + len(dot)
    start = re.search(r"[A-Za-z0-9_\-]*\Z", braces[1])
    assert start is not None, "an empty word always matches"
    return before, braces.start(1) + start.start()


def _numbered(last: int, *, inside: bool) -> list[Segment]:
    """Ways to name the blocks of a list, rather than every number."""
    if inside:
        return [Segment(f"0..{last}", "a range of blocks")]
    return [
        Segment("*", f"all {last + 1}"),
        Segment(f"{{0..{last}}}", "a range of blocks"),
        *(Segment(str(n), "one block") for n in sorted({0, last})),
    ]


def _holders(manifest: Manifest, before: str) -> Iterator[str]:
    """Return the modules that the finished part of a path matches; the model itself where there is none."""
    if not before:
        return iter([""])
    return iter(matching(manifest, before))


def matching(manifest: Manifest, path: str, *, parameters: bool = False) -> list[str]:
    """The modules, and parameters, that a path matches; none where it cannot be read."""
    try:
        found = pattern(path)
    except PathError:
        return []
    names = list(manifest.modules)
    if parameters:
        names += [info.child_path(item.name) for info in manifest.modules.values() for item in info.parameters]
    return [name for name in names if found.matches(name)]
