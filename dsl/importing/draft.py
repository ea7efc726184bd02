"""A plan that is being written of a TorchTitan config."""

from __future__ import annotations

from dataclasses import dataclass, field

from legoai.dsl.importing.config import Config
from legoai.dsl.importing.models import Flavour


@dataclass(slots=True)
class Draft:
    """A plan under construction.

    Attributes:
        config: that is translated.
        flavour: the model.
        sizes: of the mesh's axes, except for `ep`.
        micro: samples of a micro batch; 0 before the batch is written.
        lines: its statements.
        lost: options, or values of them, that change the training and are not translated, with the reason.
        notes: differences between the plan and TorchTitan, a sentence each.
    """

    config: Config
    flavour: Flavour
    sizes: dict[str, int]
    micro: int = 0
    lines: list[str] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def sharded(self) -> list[str]:
        """Return the axes over which FSDP shards, if one of them has several ranks."""
        return [axis for axis in ("dp_shard", "cp") if self.sizes[axis] > 1]

    @property
    def ep(self) -> int:
        """Return the number of ranks over which the experts of a layer are."""
        return int(self.config["parallelism.expert_parallel_degree"]) if self.flavour.has_experts else 1
