"""Calibration: the speed of this machine, measured and written as a profile."""
