"""Devices and networks that a plan runs on, and what one operation costs there."""
