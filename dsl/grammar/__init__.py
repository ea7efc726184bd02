"""The plan grammar, as package data."""
