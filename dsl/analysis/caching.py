"""Caching of facts: functions whose results are cached with the analysis that they are computed from."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from pathlib import Path
from typing import Protocol, TypeVar

from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.plan import Plan

T = TypeVar("T")


class Facts(Protocol):
    """The part of :class:`~legoai.dsl.analysis.analysis.Analysis` that facts read, so that it can use facts itself."""

    manifest: Manifest | None
    directory: Path

    @property
    def plan(self) -> Plan:
        """The plan, without statements that are idle."""

    def once(self, what: Hashable, compute: Callable[[], T]) -> T:
        """Return the result of ``compute``, which is called once for each ``what``."""


F = TypeVar("F", bound=Facts)


def fact(compute: Callable[[F], T]) -> Callable[[F], T]:
    """Mark a function of an analysis whose result is cached with the analysis."""

    @wraps(compute)
    def held(analysis: F) -> T:
        return analysis.once(compute, lambda: compute(analysis))

    return held
