"""Data-dependent row counts, such as those of experts: read in forward, and reused in recomputation.

A tracer gives each number that the host reads a symbol. A second read in recomputation would get another symbol,
without a guarantee that both are equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

from legoai.lowering.graph.step.places import Places
from legoai.runtime.parallelism import experts
from legoai.runtime.torch_internals.operators import running_backward
from legoai.runtime.torch_internals.patching import patched_attribute
from legoai.specs.models import mixtral

_READERS = ((experts, "rows_exchanged"), (experts, "rows_with_room"), (mixtral, "rows_of_groups"))


_READING: Final[list[None]] = []


def is_reading() -> bool:
    """Return whether such numbers are being read, which happens only in forward."""
    return bool(_READING)


@contextlib.contextmanager
def _as_reading() -> Iterator[None]:
    _READING.append(None)
    try:
        yield
    finally:
        _READING.pop()


@contextlib.contextmanager
def read_once(places: Places) -> Iterator[None]:
    """While entered, let recomputed modules reuse the numbers that they have read in forward."""
    known: dict[tuple[str, int], Any] = {}

    def once(read: Callable[..., Any]) -> Callable[..., Any]:
        def of_forward(*args: Any) -> Any:
            reading = places.next_reading()
            if not running_backward():
                with _as_reading():
                    known[reading] = read(*args)
            return known[reading]

        return of_forward

    with contextlib.ExitStack() as stack:
        for owner, name in _READERS:
            stack.enter_context(patched_attribute(owner, name, once(getattr(owner, name))))
        yield
