"""Marks of tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some_slow(names: Iterable[str], *slow: str) -> list[Any]:
    """Parameters of a test, some of them marked slow: the others take the same ways through the code."""
    found = list(names)
    assert set(slow) <= set(found), set(slow) - set(found)
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in found]
