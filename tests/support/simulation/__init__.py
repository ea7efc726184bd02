"""Simulation in tests: programs, traces, timelines and allocators, and searches over them."""
