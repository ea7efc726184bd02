"""Computation of modules: kernels of attention, recomputation, compilation and dtypes."""
