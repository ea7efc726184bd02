"""Rules about how modules compute: kernels, compilation, recomputation and dtypes."""
