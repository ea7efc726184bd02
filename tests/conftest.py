"""Fixtures of all tests, and the path on which child processes find `support`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from support import TESTS
from support.gloo import GlooPool
from support.manifests import inspected_in_this_process, manifests_computed_once

# Programs that tests start (torchrun, `python -c`, model factories) import `support` as the tests do.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))


@pytest.fixture(scope="session", autouse=True)
def _interrupts_reach_children() -> None:
    """A session that was started in the background ignores SIGINT, and so would every process that a test starts."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _manifests_are_computed_once() -> Iterator[None]:
    with manifests_computed_once():
        yield


@pytest.fixture(scope="module", autouse=True)
def inspector() -> Iterator[None]:
    """Models are inspected in this process; tests of the subprocess itself override this fixture."""
    with inspected_in_this_process():
        yield


@pytest.fixture(scope="session")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], GlooPool]]:
    """`gloo(world)(function, *args)` runs a module-level function on `world` ranks and returns their results.

    One pool is alive at a time, and none after the session.
    """
    pool: GlooPool | None = None

    def of(world: int) -> GlooPool:
        nonlocal pool
        if pool is None or pool.world != world or not pool.alive:
            if pool is not None:
                pool.close()
            _import_before_the_fork()
            pool = GlooPool(world, tmp_path_factory.mktemp(f"gloo{world}-"))
        return pool

    yield of
    if pool is not None:
        pool.close()


def _import_before_the_fork() -> None:
    import legoai.runtime.trainer  # noqa: F401
