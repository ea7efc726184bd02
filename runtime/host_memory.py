"""Reuse of freed host memory in CPU training, without a system call in each step."""

from __future__ import annotations

import ctypes
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_MAX: Final = -4
_NEVER: Final = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let the C library keep what is freed, and return whether it can.

    By default glibc gives large blocks back to the system when they are freed, and the top of its heap when more than
    some megabytes of it are free. A training step frees all of its activations and asks for as many in the next, and
    each page of them is then mapped and zeroed again when it is first touched, which can take longer than what is
    computed in it. The process keeps its peak until it ends, as a GPU's caching allocator does; the heap may grow in
    the first steps, until its holes fit what is asked for again. The options are those of `mallopt(3)`; another C
    library has none, and is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
