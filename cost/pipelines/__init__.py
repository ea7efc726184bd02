"""Pipelines: capture of ranks that hold stages of a model."""
