"""Torch's integer program for how much of its activations each block discards; importing it needs PuLP."""

from torch.distributed._tools.sac_ilp import sac_milp

__all__ = ["sac_milp"]
