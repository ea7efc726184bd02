"""The simulator and the search."""
