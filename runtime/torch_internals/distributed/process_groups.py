"""Patches of how process groups wait, and of how torchrun's agent ends its ranks."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist

from legoai.runtime.torch_internals.patching import original, patched

_TIMEOUT = "torch.distributed.distributed_c10d:_get_default_timeout"
_START = "torch.distributed.elastic.multiprocessing.api:PContext.start"
_CLOSE = "torch.distributed.elastic.multiprocessing.api:PContext.close"

Ranks: TypeAlias = Mapping[int, tuple["subprocess.Popen[bytes]", Mapping[str, str]]]
"""The process of each local rank, and the environment that the agent gave it."""


@contextlib.contextmanager
def group_timeout(timeout: timedelta) -> Iterator[Callable[[timedelta], None]]:
    """Apply one timeout to every process group created while entered, including those of meshes.

    Yields a function that sets another timeout for all of them, and for later ones.
    """
    earlier, now = set(dist.distributed_c10d._world.pg_map), timeout

    def give(other: timedelta) -> None:
        nonlocal now
        now = other
        for group in set(dist.distributed_c10d._world.pg_map) - earlier:
            dist.distributed_c10d._set_pg_timeout(other, group)

    with patched(_TIMEOUT, lambda backend: now):
        yield give


@contextlib.contextmanager
def grace_after_failure(seconds: int, *, before: Callable[[Ranks], None]) -> Iterator[None]:
    """Set how long torchrun's agent waits, after a rank has failed, until it kills the others; 30 s by default.

    The time that ranks have after a signal to the agent is not changed.

    Args:
        seconds: to wait.
        before: called before the agent ends the others, also where all have ended without a failure.
    """
    close = original(_CLOSE)

    def close_soon(self: Any, death_sig: Any = None, timeout: int = 30) -> None:
        if death_sig is None:
            before({rank: (one.proc, self.envs[rank]) for rank, one in self.subprocess_handlers.items()})
        close(self, death_sig, seconds if death_sig is None else timeout)

    with patched(_CLOSE, close_soon):
        yield


@contextlib.contextmanager
def starting_under(context: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Let torchrun's agent start its ranks within a context, such as one that holds signals."""
    start = original(_START)

    def start_within(self: Any) -> None:
        with context():
            start(self)

    with patched(_START, start_within):
        yield
