"""Codes and pages of the diagnostics that no check of a resolved plan makes."""
