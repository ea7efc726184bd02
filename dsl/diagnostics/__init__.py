"""Diagnostics as data: their records, their codes with a page each, and suggestions for misspelt words."""
