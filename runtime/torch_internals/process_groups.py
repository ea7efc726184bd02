"""Patches of how process groups wait, and of how torchrun's agent ends its ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from legoai.runtime.torch_internals.patching import original, patched

_TIMEOUT = "torch.distributed.distributed_c10d:_get_default_timeout"
_CLOSE = "torch.distributed.elastic.multiprocessing.api:PContext.close"


@contextlib.contextmanager
def group_timeout(timeout: timedelta) -> Iterator[None]:
    """Give every process group that is made while entered, those of meshes too, the same timeout."""
    with patched(_TIMEOUT, lambda backend: timeout):
        yield


@contextlib.contextmanager
def grace_after_failure(seconds: int) -> Iterator[None]:
    """Let torchrun's agent wait so long, after a rank has failed, until it kills the others; 30 s by default.

    What the others have after a signal to the agent is not changed.
    """
    close = original(_CLOSE)

    def close_soon(self: Any, death_sig: Any = None, timeout: int = 30) -> None:
        close(self, death_sig, seconds if death_sig is None else timeout)

    with patched(_CLOSE, close_soon):
        yield
