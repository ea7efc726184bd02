"""Defaults that a plan makes idle, such as the size of buckets under a pipeline, and an expansion without them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from legoai.dsl.diagnostics.diagnostic import Diagnostic
from legoai.dsl.formatting.expand import Addition, Default, expand
from legoai.dsl.frontend.resolve import Resolution


def expand_meant(resolution: Resolution, diagnose: Callable[[str], Sequence[Diagnostic]]) -> str:
    """Return the plan's text with every default that has an effect.

    A rule about an option without effect takes it as meant where it is written. Defaults about which the expansion
    gets diagnostics that the plan does not have are left out.

    Args:
        resolution: of the plan.
        diagnose: lints a text of the plan.
    """
    known = diagnose(resolution.file.text)
    idle: set[Default] = set()
    while True:
        found = expand(resolution, idle)
        blamed: set[Default] = set()
        for item in _beyond(diagnose(found.text), known):
            blamed |= {addition.default for addition in _about(item, found.additions)}
        if not blamed:
            return found.text
        idle |= blamed


def _beyond(found: Sequence[Diagnostic], known: Sequence[Diagnostic]) -> Iterator[Diagnostic]:
    """The diagnostics that were not known, of the codes of which there are more; a message may name other options."""
    codes = Counter(item.code for item in found) - Counter(item.code for item in known)
    messages = {(item.code, item.message) for item in known}
    return (item for item in found if item.code in codes and (item.code, item.message) not in messages)


def _about(item: Diagnostic, additions: Iterable[Addition]) -> list[Addition]:
    """The additions that a diagnostic is about: those at its label, else those in the statement of its label."""
    for label in (item.label, *item.others):
        span = label.span
        here = [addition for addition in additions if span.is_inside(addition.span)]
        if here:
            return [min(here, key=lambda addition: addition.span.end - addition.span.start)]
        inside = [addition for addition in additions if addition.span.is_inside(span)]
        beside = inside or [addition for addition in additions if span.is_inside(addition.statement)]
        if beside:
            return [one for one in beside if f"`{one.default.option}" in item.message] or beside
    return []
