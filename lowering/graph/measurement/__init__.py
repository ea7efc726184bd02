"""Measurement of the first steps of a run, and the second round of passes that uses it."""
