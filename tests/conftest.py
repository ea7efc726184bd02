"""Fixtures of all tests, and the path on which child processes find `support`."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from support import TESTS
from support.models.manifests import inspected_in_this_process, manifests_computed_once
from support.training.gloo import GlooPool

# Programs that tests start (torchrun, `python -c`, model factories) import `support` as the tests do.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))

# Cores are shared by sessions and their ranks, and operators of small models wait for threads longer than they compute.
# torch reads it when it is imported; so does every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hundreds of processes that tests start would each compile the sources anew, and each session the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# How long an example takes depends on what else runs on the machine.
settings.register_profile("any time", deadline=None)
settings.load_profile("any time")


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of garbage collections, and collect more rarely.

    These took a fifth of the time of simulations and searches, whose tens of thousands of new objects stay alive.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def _interrupts_reach_children() -> None:
    """A session that was started in the background ignores SIGINT, and so would every process that a test starts."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a session keeps is not the user's, and what the user keeps answers no test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


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

    Pools of up to four ranks stay alive beside each other, since most tests compare one world with another. A larger
    one is alive alone, and none after the session.
    """
    pools: dict[int, GlooPool] = {}

    def of(world: int) -> GlooPool:
        known = pools.get(world)
        if known is None or not known.alive:
            for other in [other for other in pools if other == world or max(world, other) > 4]:
                pools.pop(other).close()
            _import_before_the_fork()
            pools[world] = GlooPool(world, tmp_path_factory.mktemp(f"gloo{world}-"))
        return pools[world]

    yield of
    for pool in pools.values():
        pool.close()


def _import_before_the_fork() -> None:
    """Import once what each rank would import in its first steps: torch imports its compiler there.

    A model of `transformers` with images imports what draws them, which takes a rank seconds.
    """
    import torch._dynamo
    import torch.distributed.pipelining  # noqa: F401

    import legoai.lowering.graph.contracts
    import legoai.runtime.training.trainer  # noqa: F401

    with contextlib.suppress(ImportError):
        import transformers.models.clip.modeling_clip  # noqa: F401
