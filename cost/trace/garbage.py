"""Control of the cyclic garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected(*, kept: bool = False) -> Iterator[None]:
    """Disable the cyclic garbage collector: its passes over live records are pure overhead.

    Objects in cycles then live to the end, in every run.

    Args:
        kept: whether the live objects contain no garbage cycles, so that the collector need not visit them later
            either.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if kept:
            gc.freeze()
        if enabled:
            gc.enable()


@contextlib.contextmanager
def collected() -> Iterator[None]:
    """Enable the cyclic garbage collector within :func:`uncollected`, for code that leaves cycles."""
    enabled = gc.isenabled()
    gc.enable()
    try:
        yield
    finally:
        if not enabled:
            gc.disable()
