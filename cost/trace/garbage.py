"""Control of the cyclic garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable the cyclic garbage collector: its passes over live records are pure overhead.

    What a program leaves in cycles then lives to the end, in every run alike.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
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
