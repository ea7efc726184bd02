"""Context-parallel attention, its kernels, and the choice of the attention kernel of a run."""
