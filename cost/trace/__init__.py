"""Segmented traces: the ops of one rank in a step, with repeated segments stored once."""
