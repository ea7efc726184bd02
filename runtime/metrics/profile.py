"""Profile of one step of a run, by torch's profiler, as a Chrome trace for each rank."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from legoai.runtime.device import Device

_PROBE_BYTES: Final = 1 << 16


@contextlib.contextmanager
def profiled(device: Device) -> Iterator[profile]:
    """Profile what runs while entered, with the shapes of operands.

    Args:
        device: whose kernels are profiled, besides the host's operators.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as found:
        yield found
        device.synchronize()


def write_trace(found: profile, path: Path) -> None:
    """Write a profile atomically as a Chrome trace, which <https://ui.perfetto.dev> opens.

    Raises:
        OSError: it cannot be written.
    """
    draft = path.with_suffix(".tmp")
    drafts = (draft, draft.with_suffix(".tmp.tmp"))  # torch's own draft stays where it cannot be written to its end
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(draft))
        if not draft.exists():
            # torch logs that its file could not be written, and raises nothing: another file shows the reason.
            draft.write_bytes(bytes(_PROBE_BYTES))
            raise OSError(errno.EIO, "torch wrote no trace", str(draft))
        draft.rename(path)
    except OSError:
        for file in drafts:
            with contextlib.suppress(OSError):
                file.unlink()
        raise


def trace_path(out: Path, step: int) -> Path:
    """Return where the profile of a step of this rank is written, in the run's folder."""
    return out / "profile" / f"step-{step}-rank-{dist.get_rank()}.json"
