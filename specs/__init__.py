"""Vocabulary of plans: the resolved plan, directives, clusters, units, reference models."""
