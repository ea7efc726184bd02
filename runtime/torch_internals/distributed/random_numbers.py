"""Random numbers that operators on DTensors draw: each shard its part of the sequence that a whole tensor would draw.

DTensor moves the offset of the device's generator for each shard. By default it makes what does so at the first such
operator, by a broadcast over all ranks, within a rank's forward: each rank is given the generator of rank 0, so that
data ranks drop the same elements, and a recomputation that restores the state from before draws other numbers than
forward did. The ranks of another pipeline stage may never take part.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _random


def distribute_random_numbers(mesh: DeviceMesh, *, has_state: bool) -> None:
    """Let DTensors on a mesh of accelerators draw by the generators as they are; ranks exchange nothing.

    The caller seeds the generators: equally where ranks hold shards of one tensor, differently elsewhere.

    Args:
        mesh: of the run; its device type decides.
        has_state: False for a simulated device, whose generator has no offset to move.
    """
    tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)
    tracker.distribute_region_enabled = has_state
    _random._rng_tracker = tracker


def forget_random_numbers() -> None:
    """Undo :func:`distribute_random_numbers`."""
    _random._rng_tracker = None
