"""Torch's integer program that says what each block discards of its activations; importing it needs PuLP."""

from torch.distributed._tools.sac_ilp import sac_milp

__all__ = ["sac_milp"]
