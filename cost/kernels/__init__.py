"""Kernels: the work that each does, and models of its time."""
