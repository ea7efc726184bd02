"""Measured throughput of the configurations that the simulator ranks first."""
