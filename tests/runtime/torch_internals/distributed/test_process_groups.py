"""Timeouts of the groups of mesh axes, and the patience of torchrun's agent."""

from __future__ import annotations

import signal
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.api import PContext

from legoai.runtime.device import Device
from legoai.runtime.launching.signals import held_signals
from legoai.runtime.parallelism.mesh import join_axes, split_off_experts
from legoai.runtime.process_group import STARTUP_SECONDS, process_group
from legoai.runtime.torch_internals.distributed.process_groups import grace_after_failure, starting_under
from support.simulation.simulated import in_a_fork


def timeouts(seconds: float) -> list[float]:
    """Timeouts of the groups of a mesh that was sliced, flattened and joined."""
    with process_group(Device(type="cpu"), timeout_seconds=seconds):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        groups = [mesh.get_group(axis) for axis in ("dp_shard", "tp")]
        groups.append(join_axes(mesh, ("dp_shard", "tp")).get_group())
        groups.append(split_off_experts(mesh["dp_shard"], ep=2).get_group("ep"))
        groups.append(dist.new_group([0, 1, 2, 3]))
    return [timeout_of(group) for group in groups]


def start_and_go_on(seconds: float) -> tuple[list[float], list[float]]:
    """Timeouts of the groups of a run, in a process of its own, before its first step is done and after."""
    with process_group(Device(type="cpu"), timeout_seconds=seconds) as started:
        groups = [dist.group.WORLD, init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",)).get_group()]
        before = [timeout_of(group) for group in groups]
        started()
        return before, [timeout_of(group) for group in (*groups, dist.new_group([0]))]


def split_after_leaving() -> tuple[bool, bool]:
    """Whether equal meshes give equal split ones within a run, and after it."""
    found = []
    for _ in range(2):
        with process_group(Device(type="cpu"), timeout_seconds=7.0):
            meshes = [init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",)) for _ in range(2)]
            found.append([split_off_experts(mesh, ep=1) for mesh in meshes])
    (first, again), (later, _) = found
    return first is again, first is later


def test_meshes_are_forgotten_with_their_groups():
    assert in_a_fork(split_after_leaving) == (True, False)


@pytest.mark.parametrize(("seconds", "start"), [(7.0, STARTUP_SECONDS), (STARTUP_SECONDS + 1, STARTUP_SECONDS + 1)])
def test_short_timeout_applies_after_the_first_step(seconds: float, start: float):
    before, after = in_a_fork(start_and_go_on, seconds)
    assert set(before) == {start} and len(before) == 2
    assert set(after) == {seconds} and len(after) == 3


def timeout_of(group: dist.ProcessGroup) -> float:
    backend = group._get_backend(next(iter(group._device_types)))
    found: timedelta = backend.options._timeout
    return found.total_seconds()


def test_groups_of_mesh_axes_have_the_timeout_of_the_run(gloo):
    for found in gloo(4)(timeouts, 7.0):
        assert set(found[1:]) <= {7.0, 60.0} and found.count(7.0) >= 4, found


def test_ranks_are_killed_soon_after_a_failure():
    class Closed(PContext):
        def __init__(self) -> None:
            self.waited: list[int] = []
            self._tail_logs: list[object] = []
            self.subprocess_handlers = {0: SimpleNamespace(proc="a process")}
            self.envs = {0: {"RANK": "4"}}
            self.filtered_stdout = self.filtered_stderr = None

        def _start(self) -> None: ...
        def _poll(self) -> None: ...
        def pids(self) -> dict[int, int]:
            return {}

        def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
            self.waited.append(timeout)

    context, seen = Closed(), []
    with grace_after_failure(5, before=lambda ranks: seen.append((ranks, list(context.waited)))):
        context.close()
        context.close(signal.SIGTERM, 120)
    context.close()
    assert context.waited == [5, 120, 30]
    assert seen == [({0: ("a process", {"RANK": "4"})}, [])]


def test_ranks_are_started_while_signals_are_held():
    class Started(PContext):
        def __init__(self) -> None:
            self._tail_logs: list[object] = []

        def _start(self) -> None:
            self.held = signal.pthread_sigmask(signal.SIG_BLOCK, ())

        def _poll(self) -> None: ...
        def pids(self) -> dict[int, int]:
            return {}

        def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None: ...

    context, handlers = Started(), {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        with starting_under(held_signals):
            context.start()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, handlers[number])
    assert {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} <= context.held
    assert not {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} & signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.fixture(autouse=True)
def _groups_end(gloo):
    yield
    gloo(4).close()
