"""Passes that rewrite the graph of a step, one in a module, and the blocks and memory that they read in it."""
