"""Selective activation checkpointing: policies, and the choice of saved outputs within a memory budget."""
