"""Codes and pages of the diagnostics that are not checks of a resolved plan."""
