"""Statements of a plan: those of its bases and variants merged, expanded, and read as their families declare them."""
