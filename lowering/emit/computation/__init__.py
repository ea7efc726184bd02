"""Emission of how modules compute: kernels, compilation, recomputation, dtypes and the loss."""
