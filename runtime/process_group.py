"""The process group of a run, and collectives over all ranks."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from legoai.runtime.attempt import agree_on_attempt, store_outlives_ranks
from legoai.runtime.device import Device
from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.parallelism.mesh import forget_split_meshes
from legoai.runtime.torch_internals.compiler.cuda_graphs import drop_cuda_graphs
from legoai.runtime.torch_internals.distributed.gloo_workers import wait_for_gloo_workers
from legoai.runtime.torch_internals.distributed.process_groups import group_timeout

Result = TypeVar("Result")


STARTUP_SECONDS: Final = 600.0
"""What ranks wait for one another at least until their first step is done: one reads a corpus or a checkpoint for all,
and each imports, builds and compiles, which takes some of them longer. Torch's own timeout over NCCL."""


@dataclass(slots=True)
class _Patience:
    seconds: float = STARTUP_SECONDS
    starting: bool = True


_patience: Final = _Patience()
"""Of this process."""


def patience() -> tuple[float, bool]:
    """Return the seconds that this rank waits, or waited, in a collective, and whether its first step is to come."""
    return _patience.seconds, _patience.starting


@contextlib.contextmanager
def process_group(device: Device, *, timeout_seconds: float) -> Iterator[Callable[[], None]]:
    """Join the group that torchrun's environment describes, and always leave it.

    The timeout is also that of every group which is made while entered, such as those of mesh axes; it holds from the
    call of the function that is yielded, after the first step. Until then it is :data:`STARTUP_SECONDS`, if that is
    longer. Without torchrun's environment the group has this one process. A group that the caller has already made is
    used and left alone, and the others have the timeout from their beginning.

    Raises:
        RunError: the environment is only partly set.
    """
    timeout, given = timedelta(seconds=timeout_seconds), dist.is_initialized()
    _patience.seconds = timeout_seconds if given else max(timeout_seconds, STARTUP_SECONDS)
    _patience.starting = True
    with group_timeout(timedelta(seconds=_patience.seconds)) as give:

        def started() -> None:
            _patience.seconds, _patience.starting = timeout_seconds, False
            give(timeout)

        if given:
            yield started
            return
        _join(device, timedelta(seconds=_patience.seconds))
        try:
            yield started
        except (Exception, SystemExit) as error:
            if dist.get_world_size() == 1 or isinstance(error, RunError):
                _leave()
            raise  # else a group may wait for ranks that are gone, until the process ends
        except BaseException:
            _leave()
            raise
        else:
            _leave()
        finally:
            wait_for_gloo_workers()  # the interpreter may end now


def _join(device: Device, timeout: timedelta) -> None:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if not missing and store_outlives_ranks():
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        name = agree_on_attempt(store, rank=rank, world_size=world_size, timeout=timeout)
        dist.init_process_group(
            device.collective_backend,
            store=PrefixStore(name, store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    elif not missing:
        dist.init_process_group(device.collective_backend, timeout=timeout)
    elif "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        raise RunError(
            RunErrorCode.WORLD_SIZE,
            f"the environment is torchrun's only in part: {', '.join(missing)} not set",
            help="start the program with torchrun",
        )
    else:
        dist.init_process_group(device.collective_backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)


def _leave() -> None:
    """Destroy all groups, after the CUDA graphs that contain their collectives, for which NCCL would wait."""
    drop_cuda_graphs()
    dist.destroy_process_group()
    forget_split_meshes()


def record_collectives(device: Device, folder: Path | None, *, entries: int) -> None:
    """Let NCCL's groups of a GPU record their last collectives, and write them where one of them times out.

    That is torch's Flight Recorder, whose settings it reads from the environment when a group is made. What the
    environment has already stays. Each rank writes `rank_N`, which `torchfrtrace` compares.

    Args:
        device: of the run.
        folder: for what is written; None records nothing.
        entries: the last so many collectives; 0 for none.
    """
    if device.type != "cuda" or folder is None or not entries:
        return
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(entries))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if "TORCH_FR_DUMP_TEMP_FILE" not in os.environ:
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(folder / "rank_")


class _OfThread(threading.local):
    group: dist.ProcessGroup | None = None


_of_thread: Final = _OfThread()
"""The group over which this thread's objects go; None for that of the run."""


@contextlib.contextmanager
def talking_over(group: dist.ProcessGroup) -> Iterator[None]:
    """Send this thread's objects over another group of all ranks, separate from those of other threads."""
    before, _of_thread.group = _of_thread.group, group
    try:
        yield
    finally:
        _of_thread.group = before


def group_of_thread() -> dist.ProcessGroup | None:
    """Return the group over which this thread talks to all ranks; None for that of the run."""
    return _of_thread.group


def sum_over_world(values: torch.Tensor) -> list[float]:
    """Add the values of all ranks, elementwise: [n] to n numbers."""
    if dist.get_world_size() > 1:
        dist.all_reduce(values)
    return [float(value) for value in values.tolist()]


def on_first_rank(function: Callable[[], Result]) -> Result:
    """Call a function on rank 0 only, and return its result, or raise its error, on every rank."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0, group=group_of_thread())
    if outcome[1] is not None:
        raise outcome[1]
    result: Result = outcome[0]
    return result


def on_every_rank(function: Callable[[], Result]) -> list[Result]:
    """Call a function on every rank, and return the ranks' results, or raise the first rank's error, on every rank."""
    outcome: tuple[Result | None, Exception | None]
    try:
        outcome = function(), None
    except Exception as error:
        outcome = None, error
    outcomes = gather_objects(outcome)
    for _, raised in outcomes:
        if raised is not None:
            raise raised
    return [value for value, _ in outcomes]  # type: ignore[misc]


def gather_objects(value: Result) -> list[Result]:
    """Return the values of all ranks, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group_of_thread())
    return values
