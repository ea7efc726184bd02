"""Segmented traces: what one rank does in a step, and the parts that repeat."""
