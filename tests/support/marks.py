"""Marks of tests."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import pytest


def some_slow(names: Iterable[str], *slow: str) -> list[Any]:
    """Parameters of a test, some of them marked slow: the others take the same ways through the code."""
    found = list(names)
    assert set(slow) <= set(found), set(slow) - set(found)
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in found]


_SOLVERS = all(find_spec(name) is not None for name in ("pulp", "highspy"))
NEEDS_SOLVER = pytest.mark.skipif(not _SOLVERS, reason="needs legoai[solvers]")
"""Skips a test of integer programs where their solvers are not installed."""
