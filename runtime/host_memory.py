"""Reuse of freed host memory in CPU training, without a system call in each step."""

from __future__ import annotations

import ctypes
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_MAX: Final = -4
_NEVER: Final = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory, and return whether it can.

    By default glibc returns large blocks to the operating system when they are freed, and the top of its heap when more
    than some megabytes of it are free. A training step frees all of its activations and allocates as many in the next
    step. Each of their pages is then mapped and zeroed again on first access, which can take longer than the
    computation. With this setting the process keeps its peak until it ends, like a GPU's caching allocator; the heap
    may grow in the first steps, until its holes fit later requests. The options are those of `mallopt(3)`; other C
    libraries have none, and are left unchanged.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
