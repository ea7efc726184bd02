"""Operators on the simulated device: what each computes and moves, in which dtype, and the metadata of its result."""
