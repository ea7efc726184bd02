"""Semantic differences of two plans, and the facts about them that need no simulation."""
