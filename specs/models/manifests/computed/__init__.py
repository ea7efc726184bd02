"""Manifests of built-in models, computed without torch."""
