"""GPU properties for inductor, from the device of a plan."""

from __future__ import annotations

from typing import Final

from legoai.cost.simulated.device import SimulationError
from legoai.runtime.torch_internals.inductor import DeviceProperties
from legoai.specs.cluster import Device, device, device_names

_THREADS_PER_MULTIPROCESSOR: Final = {
    "7.0": 2048, "7.5": 1024, "8.0": 2048, "8.6": 1536, "8.7": 1536, "8.9": 1536, "9.0": 2048, "10.0": 2048,
    "10.3": 2048, "12.0": 1536, "12.1": 1536,
}  # fmt: skip
"""CUDA C++ programming guide, "Technical specifications per compute capability"; the other limits are the same there:
65536 registers of a multiprocessor, 1024 threads of a block, 32 of a warp."""


def properties_of(gpu: Device | None) -> DeviceProperties:
    """Return the device properties that inductor uses.

    Inductor splits long reductions by the number of multiprocessors and of their threads. Where the device does not
    state its multiprocessors, they are those of the catalogue's first device of the same compute capability.

    Args:
        gpu: the plan's device.

    Raises:
        SimulationError: it is not given, or its compute capability is not stated or unknown.
    """
    if gpu is None:
        raise SimulationError("a program that is compiled for a GPU needs the plan to name the GPU")
    capability = gpu.compute_capability
    if capability is None or capability not in _THREADS_PER_MULTIPROCESSOR:
        known = ", ".join(_THREADS_PER_MULTIPROCESSOR)
        raise SimulationError(
            f"inductor asks for the compute capability of {gpu.name}, and that is {capability or 'not stated'}; write "
            f"`processor.compute_capability` in the device's file (one of: {known})"
        )
    major, minor = map(int, capability.split("."))
    return DeviceProperties(
        type="cuda",
        index=0,
        multi_processor_count=_multiprocessors(gpu, capability),
        cc=10 * major + minor,
        major=major,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=_THREADS_PER_MULTIPROCESSOR[capability],
        max_threads_per_block=1024,
        warp_size=32,
    )


def _multiprocessors(gpu: Device, capability: str) -> int:
    for known in (gpu, *map(device, device_names())):
        processor = known.processor
        if processor is not None and processor.compute_capability == capability and processor.multiprocessors:
            return processor.multiprocessors
    raise SimulationError(
        f"inductor asks for the number of multiprocessors of {gpu.name}; write `processor.multiprocessors` in the "
        "device's file"
    )
