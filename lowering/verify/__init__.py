"""Verification: a lowered program and the same training on one device are run and compared."""
