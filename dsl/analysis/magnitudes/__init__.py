"""Magnitudes without a simulation: bytes of state, operations of a step, and bounds."""
