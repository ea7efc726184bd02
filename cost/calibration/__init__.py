"""Calibration: measurement of this machine's speed, written as a profile."""
