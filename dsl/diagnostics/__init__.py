"""Diagnostics as data: their records, their codes and pages, and suggestions for misspelt words."""
