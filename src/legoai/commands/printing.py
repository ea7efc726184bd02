"""Standard output kept for a command's result while a model is built and simulated in this process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def printing_to_standard_error() -> Iterator[None]:
    """Send to standard error what is printed while entered, as by a model factory: also by compiled code and processes.

    Standard output may be read by another program, such as `legoai cost --json`'s.
    """
    _flush()
    with contextlib.ExitStack() as restored:
        with contextlib.suppress(OSError):  # one of both may be closed
            own = os.dup(1)
            restored.callback(os.close, own)
            restored.callback(os.dup2, own, 1)
            os.dup2(2, 1)
        restored.callback(_flush)
        restored.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def _flush() -> None:
    """Write what Python and C have buffered of standard output."""
    for stream in (sys.stdout, sys.__stdout__):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()  # type: ignore[union-attr]  # there may be none
    ctypes.CDLL(None).fflush(None)
