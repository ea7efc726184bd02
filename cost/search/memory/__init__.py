"""Joint decision of recomputation, unsharded parameters and offloading under a memory limit."""
