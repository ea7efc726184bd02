"""Measurements in the profiler traces of a run's step."""
