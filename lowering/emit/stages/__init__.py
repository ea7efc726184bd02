"""Emission of pipelines."""
