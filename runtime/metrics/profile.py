"""Profile of one step of a run, by torch's profiler, as a Chrome trace for each rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from legoai.runtime.device import Device


@contextlib.contextmanager
def profiled(path: Path, device: Device) -> Iterator[None]:
    """Profile what runs while entered, with the shapes of operands, and write the trace atomically.

    Args:
        path: of the Chrome trace, which <https://ui.perfetto.dev> opens.
        device: whose kernels are profiled, besides the host's operators.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as found:
        yield
        device.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    found.export_chrome_trace(str(draft))
    draft.rename(path)


def trace_path(out: Path, step: int) -> Path:
    """Return where the profile of a step of this rank is written, in the run's folder."""
    return out / "profile" / f"step-{step}-rank-{dist.get_rank()}.json"
