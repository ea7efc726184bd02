"""Observations of repeated blocks in simulated candidates: computation, activations and steady state."""
