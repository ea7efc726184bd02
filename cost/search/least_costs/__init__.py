"""Least costs of parts of a candidate, from which bounds of the whole are made."""
