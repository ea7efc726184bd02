"""Worker processes: results, priorities, and processes that are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

import pytest

from legoai.cost.search.evaluation.workers import WorkerKilledError, Workers, apart, first_result


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ended(result: object) -> Future[object]:
    future: Future[object] = Future()
    future.set_exception(result) if isinstance(result, Exception) else future.set_result(result)
    return future


@pytest.fixture
def workers() -> Iterator[Workers]:
    found = Workers(1)
    try:
        yield found
    finally:
        found.close()
        assert not found.begun


def test_one_process_has_the_lowest_priority(workers: Workers):
    idle, normal = workers.submit_idle(priority), workers.submit(priority)
    assert idle is not None
    assert workers.begun
    assert idle.result(60) == 19
    assert normal.result(60) == priority() < 19


def test_killed_idle_process_is_done_without(workers: Workers):
    idle = workers.submit_idle(killed)
    assert idle is not None
    assert isinstance(idle.exception(60), BrokenProcessPool)
    assert workers.submit_idle(priority) is None
    assert first_result([idle, workers.submit(priority)], 60) == priority()


def test_killed_process_is_reported(workers: Workers):
    with pytest.raises(WorkerKilledError, match="killed"):
        first_result([workers.submit(killed)], 60)
    with pytest.raises(WorkerKilledError):
        workers.submit(priority)


def test_first_of_equal_calls_counts():
    pending: Future[object] = Future()
    assert first_result([pending, ended("found")], 1.0) == "found"
    assert pending.cancelled()
    assert first_result([ended(BrokenProcessPool()), ended("found")], 1.0) == "found"
    with pytest.raises(WorkerKilledError):
        first_result([ended(BrokenProcessPool())], 1.0)
    with pytest.raises(TimeoutError):
        first_result([Future()], 0.01)


def test_killed_call_apart_is_reported():
    with pytest.raises(WorkerKilledError, match="killed"):
        apart(killed)
