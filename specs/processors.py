"""Properties of GPUs that inductor asks for, by their compute capability."""

from __future__ import annotations

from typing import Final

from legoai.specs.cluster import Device, device, device_names

THREADS_PER_MULTIPROCESSOR: Final = {
    "7.0": 2048, "7.5": 1024, "8.0": 2048, "8.6": 1536, "8.7": 1536, "8.9": 1536, "9.0": 2048, "10.0": 2048,
    "10.3": 2048, "12.0": 1536, "12.1": 1536,
}  # fmt: skip
"""CUDA C++ programming guide, "Technical specifications per compute capability"; the other limits are the same there:
65536 registers of a multiprocessor, 1024 threads of a block, 32 of a warp."""


def multiprocessors_of(gpu: Device) -> int | None:
    """Return a GPU's number of multiprocessors; where it is not stated, that of the catalogue's first GPU like it.

    None where the catalogue has no GPU of the same compute capability.
    """
    processors = (known.processor for known in (gpu, *map(device, device_names())))
    return next(
        (
            processor.multiprocessors
            for processor in processors
            if processor is not None
            and processor.multiprocessors
            and processor.compute_capability == gpu.compute_capability
        ),
        None,
    )


def missing_for_inductor(gpu: Device) -> str | None:
    """Return the field of a device's file that inductor asks for and that is missing or unknown; None without one."""
    if gpu.compute_capability not in THREADS_PER_MULTIPROCESSOR:
        return "compute_capability"
    return "multiprocessors" if multiprocessors_of(gpu) is None else None
