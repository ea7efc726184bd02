"""Verification: comparison of a lowered program with the same training on one device."""
