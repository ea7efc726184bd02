"""Control of the cyclic garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected(*, kept: bool = False) -> Iterator[None]:
    """Disable the cyclic garbage collector: its passes over live records are pure overhead.

    What a program leaves in cycles then lives to the end, in every run alike.

    Args:
        kept: nothing of it lies in cycles that end, so that the collector need not look through it afterwards either.
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
    """Enable the cyclic garbage collector for a part of what runs :func:`uncollected` that leaves cycles."""
    enabled = gc.isenabled()
    gc.enable()
    try:
        yield
    finally:
        if not enabled:
            gc.disable()
