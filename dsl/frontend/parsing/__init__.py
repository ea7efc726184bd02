"""Parsing: a plan's text to its syntax tree."""
