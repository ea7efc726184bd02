"""Warnings of torch's C++ side, held back while plans are simulated.

Simulated process groups have no backend and no hooks, about which torch warns once in each process.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import ctypes

_VARIABLE: Final = "TORCH_CPP_LOG_LEVEL"
"""Read by torch once, when it is imported, and so by processes that are started meanwhile."""

_FLAG: Final = "FLAGS_caffe2_log_level"
"""The level that c10 compares with, an exported `int`, where it is built without glog as in torch's wheels (2.13)."""

_WARNING, _ERROR = 1, 2


@contextlib.contextmanager
def without_cpp_warnings() -> Iterator[None]:
    """Hold back warnings of torch's C++ side in this process, and those that it starts; errors are printed.

    It holds also where torch is imported already, and only while entered. A level that the environment gives is kept.
    Where a build of torch does not let its level be set, warnings are held back from the first import of torch on, to
    the end of the process.
    """
    if _VARIABLE in os.environ:
        yield
        return
    level = _level()
    before = _WARNING if level is None else level.value
    os.environ[_VARIABLE] = "ERROR"
    if level is not None:
        level.value = max(before, _ERROR)
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE, None)
        level = _level()  # torch may have been imported since
        if level is not None:
            level.value = before


def _level() -> ctypes.c_int | None:
    """Return the level in c10's own memory; None where torch is not imported, or has no such flag."""
    if "torch" not in sys.modules or not hasattr(os, "RTLD_NOLOAD"):
        return None
    import ctypes  # takes milliseconds, and torch has it

    name = "libc10.dylib" if sys.platform == "darwin" else "libc10.so"
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY), _FLAG)
    except (OSError, ValueError):
        return None
