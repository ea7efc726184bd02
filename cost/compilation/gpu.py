"""GPU properties for inductor, from the device of a plan."""

from __future__ import annotations

from legoai.cost.simulated.device import SimulationError
from legoai.runtime.torch_internals.compiler.inductor import DeviceProperties
from legoai.specs.cluster import Device
from legoai.specs.processors import THREADS_PER_MULTIPROCESSOR, multiprocessors_of


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
    capability, multiprocessors = gpu.compute_capability, multiprocessors_of(gpu)
    if capability is None or capability not in THREADS_PER_MULTIPROCESSOR:
        known = ", ".join(THREADS_PER_MULTIPROCESSOR)
        raise SimulationError(
            f"inductor asks for the compute capability of {gpu.name}, and that is {capability or 'not stated'}; write "
            f"`processor.compute_capability` in the device's file (one of: {known}) [LP313]"
        )
    if multiprocessors is None:
        raise SimulationError(
            f"inductor asks for the number of multiprocessors of {gpu.name}; write `processor.multiprocessors` in the "
            "device's file [LP313]"
        )
    major, minor = map(int, capability.split("."))
    return DeviceProperties(
        type="cuda",
        index=0,
        multi_processor_count=multiprocessors,
        cc=10 * major + minor,
        major=major,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=THREADS_PER_MULTIPROCESSOR[capability],
        max_threads_per_block=1024,
        warp_size=32,
    )
