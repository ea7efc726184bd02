"""Timing: when the ops of ranks execute, and where the time of a step goes."""
