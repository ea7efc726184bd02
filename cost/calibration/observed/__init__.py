"""Measurements in the traces that torch's profiler writes of a run's step."""
