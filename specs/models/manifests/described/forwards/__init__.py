"""Findings of forwards and steps that are run for them, with other inputs or another state of the model."""
