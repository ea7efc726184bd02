"""Evaluation of candidates: lowering and simulation in worker processes, with a cache of the figures on disk."""
