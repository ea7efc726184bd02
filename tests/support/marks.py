"""Marks of tests."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


def some_slow(values: Iterable[Any], *slow: Any) -> list[Any]:
    """Parameters of a test, some of them marked slow: the others take the same ways through the code."""
    found = list(values)
    assert all(one in found for one in slow), slow
    return [pytest.param(one, marks=pytest.mark.slow) if one in slow else one for one in found]


def slow_but(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Parameters of a test, all but some of them marked slow."""
    found = list(values)
    assert all(one in found for one in quick), quick
    return some_slow(found, *(one for one in found if one not in quick))


def slow_but_longest(paths: Iterable[Path]) -> list[Any]:
    """Files as parameters, all marked slow but the longest one of each folder."""
    found = list(paths)
    longest = {path.parent: path for path in sorted(found, key=lambda path: path.stat().st_size)}
    return slow_but(found, *longest.values())


_SOLVERS = all(find_spec(name) is not None for name in ("pulp", "highspy"))
NEEDS_SOLVER = pytest.mark.skipif(not _SOLVERS, reason="needs legoai[solvers]")
"""Skips a test of integer programs where their solvers are not installed."""
