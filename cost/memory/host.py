"""Host memory in which `offload` keeps parameters, gradients and optimizer state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from legoai.cost.machine.cluster import Machine
from legoai.dsl.analysis.analysis import Analysis
from legoai.dsl.analysis.magnitudes.state import StateBytes, offloaded_bytes
from legoai.specs.models.manifests.manifest import Manifest
from legoai.specs.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes in host memory.

    Attributes:
        of_rank: of one rank, in a pipeline the mean of its stages.
        ranks: on one host.
    """

    of_rank: StateBytes
    ranks: int

    @property
    def total(self) -> int:
        """Bytes of all ranks on one host."""
        return self.of_rank.total * self.ranks


def host_memory(plan: Plan, manifest: Manifest, directory: Path, machine: Machine) -> HostMemory | None:
    """Return the host memory of offloaded state; None where no state is offloaded."""
    if plan.offload is None:
        return None
    state = offloaded_bytes(Analysis(plan, manifest, directory))
    if not state.total:
        return None
    return HostMemory(of_rank=state, ranks=min(plan.mesh.world_size, machine.network.devices_per_host))
