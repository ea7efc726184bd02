"""Emission of tensor, context and expert parallelism."""
