"""Destroying a process group waits for gloo's worker threads, with a timeout."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from legoai.runtime.device import Device
from legoai.runtime.process_group import process_group
from legoai.runtime.torch_internals.distributed import gloo_workers
from legoai.runtime.torch_internals.distributed.gloo_workers import wait_for_gloo_workers
from support.simulation.simulated import in_a_fork

linux = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the system does not tell what threads do")

LATE = """
import threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from legoai.runtime.device import Device
from legoai.runtime.process_group import process_group
from legoai.runtime.torch_internals.distributed import gloo_workers
{change}
store, taken, groups = HashStore(), threading.Event(), [None, None]

def join(rank):
    groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

def slowly(_):
    taken.set()
    for _ in range(200):
        time.sleep(0.001)  # takes Python's lock as often
    print("let go", flush=True)

with process_group(Device(type="cpu"), timeout_seconds=60):
    ranks = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    first = groups[0].allreduce([torch.ones(1)])
    called = first.get_future().then(slowly)  # by the worker, which cannot be done before the other rank begins
    second = groups[1].allreduce([torch.ones(1)])
    assert taken.wait(60)
"""
"""A program whose worker of gloo is still busy with a collective when all is done and the group is left."""


def end_of(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow
@linux
def test_process_exits_cleanly_with_a_late_worker():
    ended = end_of(LATE.format(change=""))
    assert (ended.returncode, ended.stdout) == (0, "let go\n"), ended.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python lets the threads be")
def test_process_without_waiting_is_terminated_by_a_signal():
    change = "from legoai.runtime import process_group as module; module.wait_for_gloo_workers = lambda: True"
    ended = end_of(LATE.format(change=change))
    assert ended.returncode < 0 and "terminate called" in ended.stderr


def leave(error: BaseException | None) -> list[str]:
    """Calls on leaving the process group of a run, in order."""
    calls: list[str] = []
    destroy = dist.destroy_process_group

    def destroyed() -> None:
        calls.append("destroy")
        destroy()

    def waited() -> bool:
        calls.append("wait" if not dist.is_initialized() else "wait too soon")
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "destroy_process_group", destroyed)
        patch.setattr("legoai.runtime.process_group.wait_for_gloo_workers", waited)
        try:
            with process_group(Device(type="cpu"), timeout_seconds=60):
                if error is not None:
                    raise error
        except BaseException as raised:
            assert raised is error
    return calls


@pytest.mark.parametrize("error", [None, ValueError("of the run"), KeyboardInterrupt()])
def test_workers_are_waited_for_after_the_group_is_destroyed(error: BaseException | None):
    assert in_a_fork(leave, error) == ["destroy", "wait"]


def pair() -> list[dist.ProcessGroupGloo]:
    """Two ranks in this process."""
    store, groups = HashStore(), {}

    def join(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [groups[0], groups[1]]


def waits() -> tuple[int, list[bool]]:
    """Number of named workers of two groups, and results of a wait while one worker waits for another rank."""
    groups, until = pair(), time.monotonic() + 60
    while len(gloo_workers._workers()) < 4 and time.monotonic() < until:
        time.sleep(0.001)  # a thread names itself when it first runs
    waiting = groups[0].allreduce([torch.ones(1)])
    found = [wait_for_gloo_workers(seconds=60)]
    groups[1].allreduce([torch.ones(1)]).wait()
    waiting.wait()
    return len(gloo_workers._workers()), [*found, wait_for_gloo_workers(seconds=60)]


@linux
def test_workers_are_found_by_name_and_blocked_ones_skipped():
    assert in_a_fork(waits) == (4, [True, True])  # two workers of each group


def test_busy_workers_are_awaited_with_a_timeout(monkeypatch: pytest.MonkeyPatch):
    looks: list[dict[str, tuple[str, ...]]] = []

    def look() -> dict[str, tuple[str, ...]]:
        looks.append({"1": ("S (sleeping)", "7", "0"), "2": ("S (sleeping)", str(min(len(looks), 4)), "0")})
        return looks[-1]

    monkeypatch.setattr(gloo_workers, "_workers", look)
    monkeypatch.setattr(gloo_workers, "_THREADS", Path("/"))
    assert wait_for_gloo_workers() and len(looks) == 6  # of which the fifth and the last are equal
    monkeypatch.setattr(gloo_workers, "_workers", lambda: {"1": ("R (running)", "7", "0")})
    began = time.monotonic()
    assert not wait_for_gloo_workers(seconds=0.1)
    assert time.monotonic() - began >= 0.1
