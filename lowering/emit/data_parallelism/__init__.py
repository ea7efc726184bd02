"""Emission of units and replicas, of their communication, and of the traced step."""
